//! The rules for who may use the ingress (`tunnel.steering.allow`). This module does no I/O.

use std::{collections::BTreeSet, fmt, net::IpAddr, sync::Arc};

use tunnel_common::{addr::Address, steering::Prefix};

use crate::model::PodNamespaces;

/// The forms of an entry, for error messages.
pub const ENTRY_FORM: &str = "is not host, a CIDR such as 10.0.0.0/8, or namespace: with the name of a namespace, as in namespace:monitoring";

/// The maximum length of a namespace's name (RFC 1123).
const MAX_NAMESPACE: usize = 63;

/// An entry in the list of clients that may use the ingress.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Entry {
    /// Sockets in the host's network namespace.
    Host,
    /// Clients with an address in this range.
    Range(Prefix),
    /// The Pods in this Kubernetes namespace that have addresses of their own.
    Namespace(Arc<str>),
}

impl Entry {
    fn parse(text: &str) -> Option<Self> {
        if text == "host" {
            return Some(Self::Host);
        }
        if let Some(namespace) = text.strip_prefix("namespace:") {
            let is_valid = (1..=MAX_NAMESPACE).contains(&namespace.len())
                && namespace
                    .bytes()
                    .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'));
            return is_valid.then(|| Self::Namespace(namespace.into()));
        }
        let (address, length) = text.split_once('/')?;
        let address = address.parse::<IpAddr>().ok()?;
        Prefix::containing(Address::from_ip(address), length.parse().ok()?).map(Self::Range)
    }
}

/// Returns true if this is an entry that `tunnel.steering.allow` may have.
#[must_use]
pub fn is_client_entry(text: &str) -> bool {
    Entry::parse(text).is_some()
}

/// Returns true if an entry allows the Pods of a namespace, so that the Pods on this node must be known.
#[must_use]
pub fn is_namespace_entry(text: &str) -> bool {
    matches!(Entry::parse(text), Some(Entry::Namespace(_)))
}

/// The clients that may use the ingress.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ClientRules {
    host: bool,
    ranges: Vec<Prefix>,
    namespaces: BTreeSet<Arc<str>>,
}

/// The decision on a client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Decision {
    Allowed,
    Refused(Refusal),
    /// Refused for now: the address belongs to no known Pod. The Pod may have started only just now.
    UnknownPod,
}

/// The description of a client that may not use the ingress.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    Host,
    Pod,
    /// A Pod in these namespaces. There are several while an address passes from one Pod to another.
    PodOf(BTreeSet<Arc<str>>),
    UnknownPod,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("a process in the host's network namespace"),
            Self::Pod => f.write_str("a pod"),
            Self::PodOf(namespaces) => {
                let names: Vec<_> = namespaces.iter().map(|name| &**name).collect();
                write!(f, "a pod in the namespace {}", names.join(" or "))
            }
            Self::UnknownPod => f.write_str("an address that belongs to no known pod on this node"),
        }?;
        f.write_str(" is not in tunnel.steering.allow")
    }
}

impl ClientRules {
    /// Parses the entries. In a checked config, all of them are valid.
    pub fn parse(entries: &[String]) -> Self {
        let mut rules = Self::default();
        for entry in entries.iter().filter_map(|text| Entry::parse(text)) {
            match entry {
                Entry::Host => rules.host = true,
                Entry::Range(range) => rules.ranges.push(range),
                Entry::Namespace(namespace) => {
                    rules.namespaces.insert(namespace);
                }
            }
        }
        rules
    }

    /// Decides on a client that connects from an address, over the loopback interface or a pod's link.
    pub(super) fn decide(
        &self,
        address: IpAddr,
        is_loopback: bool,
        pods: &PodNamespaces,
    ) -> Decision {
        let address = address.to_canonical();
        let in_range = Address::from_ip(address);
        let is_in_range = self.ranges.iter().any(|range| range.contains(&in_range));
        if is_in_range || is_loopback && self.host {
            return Decision::Allowed;
        }
        if is_loopback {
            return Decision::Refused(Refusal::Host);
        }
        if self.namespaces.is_empty() {
            return Decision::Refused(Refusal::Pod);
        }
        match pods.get(&address) {
            // All of them must be allowed, since it is unknown which of them has the address now.
            Some(found) if found.is_subset(&self.namespaces) => Decision::Allowed,
            Some(found) => Decision::Refused(Refusal::PodOf(found.clone())),
            None => Decision::UnknownPod,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(entries: &[&str]) -> ClientRules {
        let entries: Vec<_> = entries.iter().map(|entry| (*entry).to_owned()).collect();
        assert!(
            entries.iter().all(|entry| is_client_entry(entry)),
            "{entries:?}"
        );
        ClientRules::parse(&entries)
    }

    fn pods() -> PodNamespaces {
        let pod = |address: &str, namespaces: &[&str]| {
            let namespaces = namespaces.iter().map(|name| Arc::from(*name));
            (address.parse().expect("an address"), namespaces.collect())
        };
        PodNamespaces::from([
            pod("10.1.0.1", &["monitoring"]),
            pod("10.1.0.2", &["shop"]),
            pod("10.1.0.3", &["monitoring", "shop"]),
            pod("fd00::1", &["monitoring"]),
        ])
    }

    #[test]
    fn clients_are_allowed_by_host_range_or_namespace() {
        let (host, pod) = (true, false);
        for (entries, address, is_loopback, wanted) in [
            (&["host"][..], "192.0.2.1", host, "allowed"),
            (
                &["host"],
                "10.1.0.1",
                pod,
                "a pod is not in tunnel.steering.allow",
            ),
            (&["10.1.0.0/30"], "10.1.0.1", pod, "allowed"),
            (&["10.1.0.0/30"], "::ffff:10.1.0.1", pod, "allowed"),
            (
                &["10.1.0.0/30"],
                "10.1.0.4",
                pod,
                "a pod is not in tunnel.steering.allow",
            ),
            (&["192.0.2.1/32"], "192.0.2.1", host, "allowed"),
            (
                &["10.1.0.0/30"],
                "192.0.2.1",
                host,
                "a process in the host's network namespace is not in tunnel.steering.allow",
            ),
            (
                &["0.0.0.0/0"],
                "fd00::1",
                pod,
                "a pod is not in tunnel.steering.allow",
            ),
            (&["namespace:monitoring"], "10.1.0.1", pod, "allowed"),
            (&["namespace:monitoring"], "fd00::1", pod, "allowed"),
            (
                &["namespace:monitoring"],
                "10.1.0.2",
                pod,
                "a pod in the namespace shop is not in tunnel.steering.allow",
            ),
            (
                &["namespace:monitoring"],
                "10.1.0.3",
                pod,
                "a pod in the namespace monitoring or shop is not in tunnel.steering.allow",
            ),
            (
                &["namespace:monitoring", "namespace:shop"],
                "10.1.0.3",
                pod,
                "allowed",
            ),
            (&["namespace:monitoring"], "10.1.0.9", pod, "unknown"),
            // A socket in the host's network namespace can have a pod's address, if root binds it.
            (
                &["namespace:monitoring"],
                "10.1.0.1",
                host,
                "a process in the host's network namespace is not in tunnel.steering.allow",
            ),
        ] {
            let address = address.parse().expect("an address");
            let found = match rules(entries).decide(address, is_loopback, &pods()) {
                Decision::Allowed => "allowed".to_owned(),
                Decision::UnknownPod => "unknown".to_owned(),
                Decision::Refused(refusal) => refusal.to_string(),
            };
            assert_eq!(found, wanted, "{entries:?} {address}");
        }
    }

    #[test]
    fn invalid_entries_are_refused() {
        for entry in [
            "",
            "hosts",
            "10.0.0.0",
            "10.0.0.0/33",
            "fd00::/129",
            "namespace:",
            "namespace:A",
            "namespace:a/b",
            "monitoring",
        ] {
            assert!(!is_client_entry(entry), "{entry}");
        }
    }
}
