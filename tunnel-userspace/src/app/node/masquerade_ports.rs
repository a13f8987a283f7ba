//! Chooses the ports that stand for masqueraded clients.

use std::fs;

use tracing::warn;

/// The kernel's range of ports for sockets that bind to no port.
const LOCAL_PORTS: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// The kernel's default range (`inet_init_net` in net/ipv4/af_inet.c).
const DEFAULT_LOCAL_PORTS: (u16, u16) = (32_768, 60_999);
/// The default range of node ports (`--service-node-port-range` of kube-apiserver).
const NODE_PORTS: (u16, u16) = (30_000, 32_767);
/// The ports from which the programs choose if every port is in one of these ranges.
const LAST_RESORT: (u16, u16) = (1024, 29_999);

/// Returns the ports that stand for clients: the largest range from 1024 that contains neither the kernel's local ports
/// nor node ports, since a socket of this node could otherwise get the port of a client.
pub(super) fn choose() -> (u16, u16) {
    let local = fs::read_to_string(LOCAL_PORTS).ok();
    let local = local.and_then(|text| parse(&text));
    largest_range(local.unwrap_or(DEFAULT_LOCAL_PORTS)).unwrap_or_else(|| {
        warn!(
            ports = ?LAST_RESORT,
            "net.ipv4.ip_local_port_range leaves no port for masqueraded clients, so their ports may also be \
             chosen for sockets of this node; narrow it, or set service.packets.ports"
        );
        LAST_RESORT
    })
}

fn parse(text: &str) -> Option<(u16, u16)> {
    let mut numbers = text.split_whitespace().map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(first)), Some(Ok(last))) => Some((first, last)),
        _ => None,
    }
}

/// Returns the largest range of ports from 1024 outside the node ports and the local ports.
fn largest_range(local: (u16, u16)) -> Option<(u16, u16)> {
    let mut used = [NODE_PORTS, local];
    used.sort_unstable();
    let mut free = Vec::new();
    let mut next = 1024;
    for (first, last) in used {
        if next < first {
            free.push((next, first - 1));
        }
        next = next.max(last.saturating_add(1));
    }
    if next < u16::MAX {
        free.push((next, u16::MAX));
    }
    free.into_iter().max_by_key(|(first, last)| last - first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ports_of_clients_are_neither_local_ports_nor_node_ports() {
        for (local, expected) in [
            ((32_768, 60_999), Some((1024, 29_999))),
            ((1024, 29_999), Some((32_768, 65_535))),
            ((1024, 60_999), Some((61_000, 65_535))),
            ((10_000, 65_535), Some((1024, 9_999))),
            ((1024, 65_535), None),
            ((1, 65_534), None),
        ] {
            assert_eq!(largest_range(local), expected, "{local:?}");
        }
        assert_eq!(parse("32768\t60999\n"), Some((32_768, 60_999)));
        assert_eq!(parse("32768"), None);
    }
}
