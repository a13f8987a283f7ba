//! Rules like those of kube-proxy's nftables mode: verdict maps keyed by address, protocol and port, and a
//! chain for each Service port and for each endpoint.

use std::net::{IpAddr, SocketAddr};

use super::{Loader, MASQUERADE_MARK, NodePortService, ServiceSet};
use crate::sandbox::Sandbox;

const TABLE: &str = "ip kube-proxy";

/// Creates a loader that runs `nft` in a sandbox.
pub fn loader(sandbox: &Sandbox) -> Loader {
    Loader::new(sandbox, &["nft", "--file"])
}

/// Builds the input for a full sync.
pub fn full_sync(service_set: &ServiceSet) -> String {
    let mut text = base_table();
    for number in 0..service_set.services {
        append_cluster_ip(&mut text, number, ("tcp", service_set.port));
        append_service(&mut text, (number, "tcp"), &service_set.endpoints);
    }
    text
}

/// Builds the input for a full sync of Services, some of which have node ports on a node's address.
pub fn node_ports(node: IpAddr, services: &[NodePortService]) -> String {
    let mut text = base_table();
    text.push_str(&format!("add element {TABLE} nodeport-ips {{ {node} }}\n"));
    for service in services {
        let (number, protocol) = (service.number, service.protocol);
        append_cluster_ip(&mut text, number, (protocol, service.port));
        append_service(&mut text, (number, protocol), &[service.endpoint]);
        let Some(node_port) = service.node_port else {
            continue;
        };
        let external = format!("external-{number:08}-default/svc-{number}/{protocol}/http");
        text.push_str(&format!(
            "add chain {TABLE} {external}\n\
             add rule {TABLE} {external} jump mark-for-masquerade\n\
             add rule {TABLE} {external} goto {}\n\
             add element {TABLE} service-nodeports {{ {protocol} . {node_port} : goto {external} }}\n",
            service_chain(number)
        ));
    }
    text
}

/// Appends a Service's empty chain, and the elements for its ClusterIP.
fn append_cluster_ip(text: &mut String, number: u32, (protocol, port): (&str, u16)) {
    let (address, chain) = (ServiceSet::address(number), service_chain(number));
    text.push_str(&format!(
        "add chain {TABLE} {chain}\n\
         add element {TABLE} cluster-ips {{ {address} }}\n\
         add element {TABLE} service-ips {{ {address} . {protocol} . {port} : goto {chain} }}\n"
    ));
}

/// Builds the transaction for a partial sync that replaces a Service's endpoints: it rewrites all of the
/// Service's chains, flushes the chains of removed endpoints, and deletes the chains that were flushed
/// earlier (`stale`).
pub fn partial_sync(
    number: u32,
    endpoints: &[SocketAddr],
    removed: &[SocketAddr],
    stale: &[SocketAddr],
) -> String {
    let mut text = format!(
        "add chain {TABLE} {chain}\nflush chain {TABLE} {chain}\n",
        chain = service_chain(number)
    );
    append_service(&mut text, (number, "tcp"), endpoints);
    for to in removed {
        text.push_str(&format!(
            "flush chain {TABLE} {}\n",
            endpoint_chain(number, *to)
        ));
    }
    for to in stale {
        text.push_str(&format!(
            "delete chain {TABLE} {}\n",
            endpoint_chain(number, *to)
        ));
    }
    text
}

/// Appends the rules for a Service and its endpoints. The Service's chain must exist and be empty.
fn append_service(text: &mut String, (number, protocol): (u32, &str), endpoints: &[SocketAddr]) {
    let chain = service_chain(number);
    let (address, pods) = (ServiceSet::address(number), ServiceSet::pods());
    for to in endpoints {
        let chain = endpoint_chain(number, *to);
        let own = to.ip();
        text.push_str(&format!(
            "add chain {TABLE} {chain}\n\
             flush chain {TABLE} {chain}\n\
             add rule {TABLE} {chain} ip saddr {own} jump mark-for-masquerade\n\
             add rule {TABLE} {chain} meta l4proto {protocol} dnat to {to}\n"
        ));
    }
    let goto = |(index, to): (usize, &SocketAddr)| {
        format!("{index} : goto {}", endpoint_chain(number, *to))
    };
    let choices: Vec<_> = endpoints.iter().enumerate().map(goto).collect();
    text.push_str(&format!(
        "add rule {TABLE} {chain} ip daddr {address} ip saddr != {pods} jump mark-for-masquerade\n\
         add rule {TABLE} {chain} numgen random mod {} vmap {{ {} }}\n",
        choices.len(),
        choices.join(" , ")
    ));
}

/// Builds the table with its hooks and empty maps.
fn base_table() -> String {
    let key = "type ipv4_addr . inet_proto . inet_service : verdict";
    let node_port = "type inet_proto . inet_service : verdict";
    let chains = [
        "cluster-ips-check",
        "filter-prerouting-pre-dnat { type filter hook prerouting priority -110 ; }",
        "filter-output-pre-dnat { type filter hook output priority -110 ; }",
        "filter-forward { type filter hook forward priority 0 ; }",
        "filter-input { type filter hook input priority 0 ; }",
        "filter-output { type filter hook output priority 0 ; }",
        "firewall-check",
        "mark-for-masquerade",
        "masquerading",
        "nat-output { type nat hook output priority -100 ; }",
        "nat-postrouting { type nat hook postrouting priority 100 ; }",
        "nat-prerouting { type nat hook prerouting priority -100 ; }",
        "nodeport-endpoints-check",
        "reject-chain",
        "services",
        "service-endpoints-check",
    ];
    let mark = format!("mark-for-masquerade mark set mark or {MASQUERADE_MARK}");
    let unmarked = format!("masquerading mark and {MASQUERADE_MARK} == 0 return");
    let unmark = format!("masquerading mark set mark xor {MASQUERADE_MARK}");
    let rules = [
        "cluster-ips-check ip daddr @cluster-ips reject",
        "filter-prerouting-pre-dnat ct state new jump firewall-check",
        "filter-forward ct state new jump service-endpoints-check",
        "filter-forward ct state new jump cluster-ips-check",
        "filter-input ct state new jump nodeport-endpoints-check",
        "filter-input ct state new jump service-endpoints-check",
        "filter-output ct state new jump service-endpoints-check",
        "filter-output-pre-dnat ct state new jump firewall-check",
        "filter-output ct state new jump cluster-ips-check",
        "firewall-check ip daddr . meta l4proto . th dport vmap @firewall-ips",
        &mark,
        &unmarked,
        &unmark,
        "masquerading masquerade fully-random",
        "nat-output jump services",
        "nat-postrouting jump masquerading",
        "nat-prerouting jump services",
        "nodeport-endpoints-check ip daddr @nodeport-ips meta l4proto . th dport vmap \
         @no-endpoint-nodeports",
        "reject-chain reject",
        "services ip daddr . meta l4proto . th dport vmap @service-ips",
        "services ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports",
        "service-endpoints-check ip daddr . meta l4proto . th dport vmap @no-endpoint-services",
    ];
    let mut text = format!(
        "add table {TABLE}\n\
         add set {TABLE} cluster-ips {{ type ipv4_addr ; }}\n\
         add set {TABLE} nodeport-ips {{ type ipv4_addr ; }}\n\
         add map {TABLE} firewall-ips {{ {key} ; }}\n\
         add map {TABLE} no-endpoint-nodeports {{ {node_port} ; }}\n\
         add map {TABLE} no-endpoint-services {{ {key} ; }}\n\
         add map {TABLE} service-ips {{ {key} ; }}\n\
         add map {TABLE} service-nodeports {{ {node_port} ; }}\n"
    );
    for chain in chains {
        text.push_str(&format!("add chain {TABLE} {chain}\n"));
    }
    for rule in rules {
        text.push_str(&format!("add rule {TABLE} {rule}\n"));
    }
    text
}

fn service_chain(number: u32) -> String {
    format!("service-{number:08}-default/svc-{number}/tcp/http")
}

fn endpoint_chain(number: u32, to: SocketAddr) -> String {
    format!(
        "endpoint-{number:08}-default/svc-{number}/tcp/http__{}/{}",
        to.ip(),
        to.port()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service_set() -> ServiceSet {
        ServiceSet {
            services: 3,
            port: 80,
            endpoints: vec![([10, 1, 0, 2], 9000).into(), ([10, 1, 0, 3], 9000).into()],
        }
    }

    #[test]
    fn each_service_has_an_element_and_chooses_among_its_endpoints() {
        let text = full_sync(&service_set());

        assert_eq!(text.matches("service-ips { 10.97.").count(), 3);
        let rule = " meta l4proto tcp dnat to 10.1.0.3:9000\n";
        assert_eq!(text.matches(rule).count(), 3);
        assert!(text.contains(
            "numgen random mod 2 vmap { 0 : goto \
             endpoint-00000002-default/svc-2/tcp/http__10.1.0.2/9000 , 1 : goto \
             endpoint-00000002-default/svc-2/tcp/http__10.1.0.3/9000 }"
        ));
    }

    #[test]
    fn a_change_touches_the_chains_of_one_service() {
        let service_set = service_set();
        let to = [([10, 1, 0, 4], 9000).into(), service_set.endpoints[1]];

        let text = partial_sync(1, &to, &service_set.endpoints[..1], &[]);

        assert!(!text.contains("add element"));
        let is_its_own = |line: &str| line.contains("-00000001-default/svc-1/");
        assert!(text.lines().all(is_its_own));
        assert!(text.contains(
            "flush chain ip kube-proxy endpoint-00000001-default/svc-1/tcp/http__10.1.0.2/9000\n"
        ));
        assert!(text.contains("dnat to 10.1.0.4:9000"));
    }
}
