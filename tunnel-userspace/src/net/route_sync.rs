//! Maintains the routes that make the steering prefixes local, and the file that records them. The record is
//! needed because another program may use the same routing protocol number.

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tracing::warn;
use tunnel_common::steering::Prefix;

use super::{NetError, NetworkSettings, netlink::RouteSocket, snapshot::Snapshot};
use crate::error_chain::chain;

/// Returns the path of the file in the state directory that records the routes.
#[must_use]
pub fn record_path(state: &Path) -> PathBuf {
    state.join("routes.json")
}

/// The identity of a network namespace.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
struct NamespaceId {
    boot: String,
    /// The namespace's inode number, which is that of `/proc/<pid>/ns/net`.
    #[serde(rename = "namespace")]
    inode: u64,
}

impl NamespaceId {
    /// Returns the identity of the calling thread's network namespace.
    fn here() -> io::Result<Self> {
        Ok(Self {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?
                .trim()
                .to_owned(),
            inode: fs::metadata("/proc/thread-self/ns/net")?.ino(),
        })
    }
}

/// The record of Culvert's routes, as stored in the file.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
struct RouteRecord {
    protocol: u8,
    prefixes: Vec<String>,
    /// The network namespace that the routes are in. It is missing in records from earlier releases.
    #[serde(default, rename = "place")]
    namespace: Option<NamespaceId>,
}

impl RouteRecord {
    fn of(settings: &NetworkSettings, namespace: NamespaceId) -> Self {
        Self {
            protocol: settings.protocol,
            prefixes: settings.prefixes.iter().map(ToString::to_string).collect(),
            namespace: Some(namespace),
        }
    }

    /// Returns the inode of the routes' network namespace if it is not `here`. Returns `None` for routes from
    /// an earlier boot, which no longer exist.
    fn other_namespace(&self, here: &NamespaceId) -> Option<u64> {
        let namespace = self.namespace.as_ref()?;
        let is_other = namespace.boot == here.boot && namespace.inode != here.inode;
        (is_other && !self.prefixes.is_empty()).then_some(namespace.inode)
    }

    /// Reads the record that an earlier process left. Returns `None` if there is no file.
    fn read(path: &Path) -> Result<Option<Self>, NetError> {
        let record = match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        record.map_err(unusable(path))
    }

    fn write(&self, path: &Path) -> Result<(), NetError> {
        let write = || {
            let draft = path.with_extension("draft");
            fs::write(&draft, serde_json::to_vec(self)?)?;
            fs::rename(&draft, path)
        };
        write().map_err(unusable(path))
    }

    fn prefixes(&self) -> impl Iterator<Item = Prefix> {
        self.prefixes.iter().filter_map(|text| text.parse().ok())
    }
}

/// The state of the routes after a check.
#[derive(Default)]
pub(super) struct RouteState {
    /// The existing routes, as text.
    pub(super) routes: Vec<String>,
    /// True for each address family that has a route: IPv4, then IPv6.
    pub(super) families: [bool; 2],
    pub(super) problems: Vec<String>,
}

/// Adds any missing routes if `may_add` is true, and returns the resulting state. A problem with one prefix
/// does not affect the others.
pub(super) async fn maintain(
    settings: &NetworkSettings,
    kernel: &RouteSocket,
    snapshot: &Snapshot,
    may_add: bool,
) -> RouteState {
    let mut routed = RouteState::default();
    let replaced = if may_add {
        replace_old_routes(settings, kernel, snapshot).await
    } else {
        Ok(None)
    };
    let fresh = match replaced {
        Ok(fresh) => fresh,
        Err(error) => {
            routed.problems.push(chain(&error));
            return routed;
        }
    };
    let snapshot = fresh.as_ref().unwrap_or(snapshot);
    let mut is_any = false;
    for prefix in &settings.prefixes {
        let Some(route) = snapshot.route_for(*prefix, settings.protocol) else {
            continue;
        };
        is_any = true;
        let is_there = if snapshot.contains(&route) {
            Ok(true)
        } else if let Some(conflict) = snapshot.conflict(&route) {
            let fix = "choose another range for tunnel.steering.prefixes";
            Err(format!("{prefix}: {conflict}; {fix}"))
        } else if may_add {
            let added = kernel.add(&route).await;
            added.map(|()| true).map_err(|error| chain(&error))
        } else {
            Ok(false)
        };
        match is_there {
            Ok(false) => {}
            Err(problem) => routed.problems.push(problem),
            Ok(true) => {
                routed.routes.push(route.to_string());
                let [v4, v6] = &mut routed.families;
                *(if prefix.is_v4() { v4 } else { v6 }) = true;
            }
        }
    }
    if !is_any {
        let text = "this node has no address that can be the source of replies";
        routed.problems.push(text.to_owned());
    }
    routed
}

/// Returns the address families, IPv4 and then IPv6, of the prefixes that have a route already.
pub(super) fn routed_families(snapshot: &Snapshot, prefixes: &[Prefix], protocol: u8) -> [bool; 2] {
    let is_routed = |prefix: &Prefix| {
        let route = snapshot.route_for(*prefix, protocol);
        route.is_some_and(|route| snapshot.contains(&route))
    };
    [true, false].map(|is_v4| {
        let mut of_family = prefixes.iter().filter(|prefix| prefix.is_v4() == is_v4);
        of_family.any(is_routed)
    })
}

/// Removes routes that an earlier process added and that are no longer wanted, and records the wanted ones
/// before they are added. Returns a new snapshot if any route was removed.
async fn replace_old_routes(
    settings: &NetworkSettings,
    kernel: &RouteSocket,
    snapshot: &Snapshot,
) -> Result<Option<Snapshot>, NetError> {
    let here = NamespaceId::here().map_err(unusable(&settings.record))?;
    let old = RouteRecord::read(&settings.record)?;
    if let Some(namespace) = old.as_ref().and_then(|old| old.other_namespace(&here)) {
        warn!(
            namespace,
            "routes of an earlier process in another network namespace are not removed"
        );
    }
    let record = RouteRecord::of(settings, here);
    if old.as_ref() == Some(&record) {
        return Ok(None);
    }
    let old = old.unwrap_or_default();
    let stays =
        |prefix: &Prefix| old.protocol == record.protocol && settings.prefixes.contains(prefix);
    let stale = old.prefixes().filter(|prefix| !stays(prefix));
    let removed = remove_routes_to(kernel, snapshot, stale, old.protocol).await?;
    record.write(&settings.record)?;
    if removed == 0 {
        return Ok(None);
    }
    Ok(Some(kernel.snapshot(true).await?))
}

fn unusable(record: &Path) -> impl FnOnce(io::Error) -> NetError {
    let path = record.to_owned();
    |source| NetError::Record { path, source }
}

/// Removes the routes to `prefixes` that have the given routing protocol number. Returns how many were
/// removed.
async fn remove_routes_to(
    kernel: &RouteSocket,
    snapshot: &Snapshot,
    prefixes: impl Iterator<Item = Prefix> + Send,
    protocol: u8,
) -> Result<usize, NetError> {
    let mut removed = 0;
    for prefix in prefixes {
        for route in snapshot.local_routes(prefix, protocol) {
            kernel.remove(route).await?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes every route in the record, then the record itself. Returns how many routes were removed.
///
/// # Errors
///
/// Returns an error if a route or the record can't be removed, or if the routes are in another network
/// namespace. The record is then kept.
pub async fn remove(path: &Path) -> Result<usize, NetError> {
    let Some(record) = RouteRecord::read(path)? else {
        return Ok(0);
    };
    let here = NamespaceId::here().map_err(unusable(path))?;
    if let Some(namespace) = record.other_namespace(&here) {
        let path = path.to_owned();
        return Err(NetError::OtherNamespace { path, namespace });
    }
    let kernel = RouteSocket::open()?;
    let snapshot = kernel.snapshot(true).await?;
    let removed = remove_routes_to(&kernel, &snapshot, record.prefixes(), record.protocol).await?;
    fs::remove_file(path).map_err(unusable(path))?;
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage, AddressScope};

    use super::*;

    #[test]
    fn a_written_record_is_read_again_and_a_missing_file_is_no_record() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = record_path(dir.path());
        let settings = settings(&path);
        assert_eq!(RouteRecord::read(&path).expect("read"), None);

        let here = NamespaceId::here().expect("a namespace");
        RouteRecord::of(&settings, here)
            .write(&path)
            .expect("written");

        let read = RouteRecord::read(&path).expect("read").expect("there");
        assert_eq!(read.protocol, 176);
        assert_eq!(read.prefixes().collect::<Vec<_>>(), settings.prefixes);
        fs::write(&path, "{").expect("written");
        let error = RouteRecord::read(&path).expect_err("damaged");
        assert!(error.to_string().contains("routes.json"), "{error}");
    }

    fn settings(path: &Path) -> NetworkSettings {
        let prefix = |text: &str| text.parse().expect("a range");
        NetworkSettings {
            check_interval: std::time::Duration::from_secs(2),
            names_uplinks: false,
            prefixes: vec![prefix("198.19.0.0/16"), prefix("fd00:c01e::/64")],
            protocol: 176,
            record: path.to_owned(),
        }
    }

    #[test]
    fn a_family_is_routed_only_while_its_current_prefix_has_a_route() {
        let prefix = |text: &str| -> Prefix { text.parse().expect("a range") };
        let mut address = AddressMessage::default();
        address.header.scope = AddressScope::Universe;
        address.attributes = vec![AddressAttribute::Local([192, 0, 2, 9].into())];
        let snapshot = |routes| Snapshot::of(&[], std::slice::from_ref(&address), routes);
        let old = prefix("198.19.0.0/16");
        let route = snapshot(Vec::new()).route_for(old, 176).expect("a route");
        let existing = snapshot(vec![route.message()]);

        let routed = |prefixes: &[Prefix], protocol| routed_families(&existing, prefixes, protocol);
        assert_eq!(routed(&[prefix("fd00:c01e::/64"), old], 176), [true, false]);
        assert_eq!(routed(&[prefix("198.18.0.0/16")], 176), [false; 2]);
        assert_eq!(routed(&[prefix("198.19.0.0/17")], 176), [false; 2]);
        assert_eq!(routed(&[old], 177), [false; 2]);
        assert_eq!(
            routed_families(&snapshot(Vec::new()), &[old], 176),
            [false; 2]
        );
    }

    #[tokio::test]
    async fn the_record_of_routes_in_another_network_namespace_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = record_path(dir.path());
        let here = NamespaceId::here().expect("a namespace");
        let write =
            |namespace: NamespaceId| RouteRecord::of(&settings(&path), namespace).write(&path);

        let at = |boot: &str| NamespaceId {
            inode: 7,
            boot: boot.to_owned(),
        };
        write(at(&here.boot)).expect("written");
        let error = remove(&path).await.expect_err("elsewhere").to_string();
        assert!(error.contains("another network namespace (7)"), "{error}");
        assert!(path.exists());

        for namespace in [at("earlier"), here] {
            write(namespace).expect("written");
            assert_eq!(remove(&path).await.expect("removed"), 0);
            assert!(!path.exists());
        }
        let old = r#"{"protocol":176,"prefixes":["198.19.0.0/16"]}"#;
        fs::write(&path, old).expect("written");
        assert_eq!(remove(&path).await.expect("removed"), 0);
    }
}
