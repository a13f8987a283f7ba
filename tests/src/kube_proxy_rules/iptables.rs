//! Rules like those of kube-proxy's iptables mode: one chain that every new connection traverses until it
//! reaches its Service's rule, and a separate chain for each Service port and for each endpoint.

use std::net::SocketAddr;

use anyhow::{Result, bail};

use super::{Loader, MASQUERADE_MARK, NodePortService, ServiceSet};
use crate::sandbox::Sandbox;

/// The variants of iptables in order of preference, each with the program that loads its rules. Recent
/// kernels lack `ip_tables`, but they traverse iptables-nft's rules in the same order.
const VARIANTS: [(&str, &str); 2] = [
    ("iptables-legacy", "iptables-legacy-restore"),
    ("iptables-nft", "iptables-nft-restore"),
];

/// Finds a variant of iptables that works in a sandbox; returns its name and a loader for it.
pub fn loader(sandbox: &Sandbox) -> Result<(&'static str, Loader)> {
    for (kind, restore) in VARIANTS {
        let list = [kind, "--table", "nat", "--list-rules"];
        if sandbox.run(&list).is_ok() {
            let command_line = [restore, "--wait", "5", "--noflush", "--counters"];
            return Ok((kind, Loader::new(sandbox, &command_line)));
        }
    }
    bail!(
        "neither iptables-legacy nor iptables-nft can list the table nat: package iptables, and a \
         kernel with ip_tables or nft_compat"
    )
}

/// Builds the input for a full sync. kube-proxy writes its Services in the random order of a hash map; here,
/// they are sorted by address. If a client connects to evenly spaced Services, their rules are on average in
/// the middle of the chain in both cases.
pub fn full_sync(service_set: &ServiceSet) -> String {
    let (mut chains, mut rules) = (String::new(), String::new());
    for number in 0..service_set.services {
        let (port, endpoints) = (service_set.port, &service_set.endpoints);
        append_service(&mut chains, &mut rules, (number, "tcp", port), endpoints);
    }
    table(chains, &rules)
}

/// Builds the input for a full sync of Services, some of which have node ports.
pub fn node_ports(services: &[NodePortService]) -> String {
    let (mut chains, mut rules) = (String::new(), String::new());
    for service in services {
        let (number, protocol) = (service.number, service.protocol);
        let frontend = (number, protocol, service.port);
        append_service(&mut chains, &mut rules, frontend, &[service.endpoint]);
        let Some(node_port) = service.node_port else {
            continue;
        };
        let external = format!("KUBE-EXT-{number:016}");
        let comment = format!("-m comment --comment \"default/svc-{number}:http");
        chains.push_str(&format!(":{external} - [0:0]\n"));
        rules.push_str(&format!(
            "-A KUBE-NODEPORTS {comment}\" -m {protocol} -p {protocol} --dport {node_port} -j {external}\n\
             -A {external} {comment} external destinations\" -j KUBE-MARK-MASQ\n\
             -A {external} -j KUBE-SVC-{number:016}\n"
        ));
    }
    let forward = format!(
        "*filter\n:KUBE-FORWARD - [0:0]\n\
         -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\n\
         -A KUBE-FORWARD -m mark --mark {MASQUERADE_MARK}/{MASQUERADE_MARK} -j ACCEPT\n\
         -A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n\
         -A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD\n\
         COMMIT\n"
    );
    table(chains, &rules) + &forward
}

/// Builds the table nat from the Services' chains and rules.
fn table(services: String, rules: &str) -> String {
    let mut chains = String::from(
        "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-POSTROUTING - [0:0]\n\
         :KUBE-MARK-MASQ - [0:0]\n",
    );
    chains.push_str(&services);
    chains.push_str(rules);
    chains.push_str(&format!(
        "-A KUBE-SERVICES -m comment --comment \"kubernetes service nodeports\" -m addrtype \
         --dst-type LOCAL -j KUBE-NODEPORTS\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark {MASQUERADE_MARK}\n\
         -A KUBE-POSTROUTING -m mark ! --mark {MASQUERADE_MARK}/{MASQUERADE_MARK} -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark {MASQUERADE_MARK}\n\
         -A KUBE-POSTROUTING -m comment --comment \"kubernetes service traffic requiring SNAT\" \
         -j MASQUERADE --random-fully\n\
         -A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
         -A OUTPUT -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
         -A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n\
         COMMIT\n"
    ));
    chains
}

fn append_service(
    chains: &mut String,
    rules: &mut String,
    (number, protocol, port): (u32, &str, u16),
    endpoints: &[SocketAddr],
) {
    let (address, pods) = (ServiceSet::address(number), ServiceSet::pods());
    let service = format!("KUBE-SVC-{number:016}");
    let comment = format!("-m comment --comment \"default/svc-{number}:http");
    let to = format!("-m {protocol} -p {protocol} -d {address} --dport {port}");
    chains.push_str(&format!(":{service} - [0:0]\n"));
    rules.push_str(&format!(
        "-A KUBE-SERVICES {comment} cluster IP\" {to} -j {service}\n\
         -A {service} {comment} cluster IP\" {to} ! -s {pods} -j KUBE-MARK-MASQ\n"
    ));
    for (index, to) in endpoints.iter().enumerate() {
        let own = to.ip();
        let endpoint = format!("KUBE-SEP-{number:012}{index:04}");
        let remaining = endpoints.len().saturating_sub(index);
        let probability = match remaining {
            0 | 1 => String::new(),
            remaining => format!(
                "-m statistic --mode random --probability 0.{:010} ",
                10_000_000_000_usize / remaining
            ),
        };
        chains.push_str(&format!(":{endpoint} - [0:0]\n"));
        rules.push_str(&format!(
            "-A {service} {comment} -> {to}\" {probability}-j {endpoint}\n\
             -A {endpoint} {comment}\" -s {own} -j KUBE-MARK-MASQ\n\
             -A {endpoint} {comment}\" -m {protocol} -p {protocol} -j DNAT --to-destination {to}\n"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_chosen_with_equal_probability() {
        let service_set = ServiceSet {
            services: 2,
            port: 80,
            endpoints: (2..5).map(|last| ([10, 1, 0, last], 9000).into()).collect(),
        };

        let text = full_sync(&service_set);

        assert_eq!(text.matches("--probability 0.3333333333 ").count(), 2);
        assert_eq!(text.matches("--probability 0.5000000000 ").count(), 2);
        assert_eq!(text.matches("--to-destination").count(), 6);
        let rules = text.lines();
        let services = rules.filter(|line| line.starts_with("-A KUBE-SERVICES"));
        let targets = services.filter_map(|line| line.rsplit(' ').next());
        // Node ports come last, as in kube-proxy.
        let order = "KUBE-SVC-0000000000000000 KUBE-SVC-0000000000000001 KUBE-NODEPORTS";
        assert_eq!(targets.collect::<Vec<_>>().join(" "), order);
    }
}
