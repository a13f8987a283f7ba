//! The clients that may use the addresses of a Service's load balancer, as listed in
//! `loadBalancerSourceRanges`. As in kube-proxy (`pkg/proxy/nftables/proxier.go`, chain `firewall-…`), the
//! Service's other addresses are not restricted. A family that has no ranges, or has a range that covers all
//! addresses (`IsZeroCIDR` in `pkg/proxy/serviceport.go`), isn't restricted either.

use std::net::{IpAddr, Ipv6Addr};

use tunnel_common::{addr::Address, service::SourceRange};

use super::NodeInfo;
use crate::model::{self, Family};

/// Returns the clients in a family that may use the load balancer's addresses, as disjoint ranges in
/// ascending order; empty if all clients may use them. If this node is one of these clients, the load
/// balancer's addresses are added to the ranges: a node that has one of these addresses uses it as the source
/// address when connecting to it.
pub(super) fn allowed_clients(
    service: &model::Service,
    family: Family,
    node_info: &NodeInfo,
) -> Vec<SourceRange> {
    let is_of = |ip: &IpAddr| Family::of(*ip) == family;
    let named = service.source_ranges.iter().filter(|(ip, _)| is_of(ip));
    let mut ranges: Vec<_> = named
        .map(|(ip, length)| network_range(*ip, *length))
        .collect();
    if service
        .source_ranges
        .iter()
        .any(|(ip, length)| is_of(ip) && *length == 0)
    {
        return Vec::new();
    }
    let primary = node_info.primary_ips.iter().copied().find(is_of);
    if primary.is_some_and(|node| ranges.iter().any(|range| contains(range, node))) {
        let vips = service.load_balancer_ips.iter().filter(|ip| is_of(ip));
        ranges.extend(vips.map(|ip| network_range(*ip, u8::MAX)));
    }
    merge(ranges)
}

/// Returns true if the host's sockets may use the address `vip`, which is restricted to these clients.
/// Returns `None` if their source address is unknown because the Node has no address in this family.
pub(super) fn admits_host(
    sources: &[SourceRange],
    vip: IpAddr,
    node_info: &NodeInfo,
) -> Option<bool> {
    // A node that has the address itself also uses it as the source address.
    let local_vip = node_info.link_addresses.contains(&vip).then_some(vip);
    let is_of = |ip: &IpAddr| Family::of(*ip) == Family::of(vip);
    let source = local_vip.or_else(|| node_info.primary_ips.iter().copied().find(is_of))?;
    Some(sources.iter().any(|range| contains(range, source)))
}

/// Returns true if an address is in a network.
pub(super) fn is_in_network(ip: IpAddr, network: IpAddr, length: u8) -> bool {
    Family::of(ip) == Family::of(network) && contains(&network_range(network, length), ip)
}

fn contains(range: &SourceRange, ip: IpAddr) -> bool {
    (range.first..=range.last).contains(&Address::from_ip(ip))
}

/// Returns the range of addresses in a network. If the prefix length is too large, the range is a single
/// address.
fn network_range(ip: IpAddr, length: u8) -> SourceRange {
    // In its IPv6 form, an IPv4 address is preceded by 96 fixed bits.
    let before = if ip.is_ipv4() { 96 } else { 0 };
    let fixed = length.saturating_add(before);
    let open = u128::MAX.checked_shr(fixed.into()).unwrap_or(0);
    let bits = to_bits(Address::from_ip(ip));
    let address = |bits| Address::from_ip(Ipv6Addr::from_bits(bits).into());
    SourceRange {
        first: address(bits & !open),
        last: address(bits | open),
    }
}

/// Sorts ranges, and merges those that overlap or are adjacent.
fn merge(mut ranges: Vec<SourceRange>) -> Vec<SourceRange> {
    ranges.sort_unstable();
    let mut merged: Vec<SourceRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if to_bits(range.first) <= to_bits(last.last).saturating_add(1) => {
                last.last = last.last.max(range.last);
            }
            Some(_) | None => merged.push(range),
        }
    }
    merged
}

fn to_bits(address: Address) -> u128 {
    u128::from_be_bytes(address.octets())
}

#[cfg(test)]
mod tests;
