//! Settings of the kernel that keep packets from backends, or replies from this host.

use std::{collections::BTreeMap, fs};

/// The value of `rp_filter` with which the kernel drops packets whose sender is reached by another link (RFC 3704).
const STRICT: u32 = 1;

/// Returns a warning for each uplink and family for which the kernel forwards no packets, and for the loopback link, by which it
/// looks up routes for packets of this host.
pub(super) fn forwarding(uplinks: &BTreeMap<u32, String>) -> Vec<String> {
    let host = ["ipv4", "ipv6"].into_iter();
    let host = host.filter(|family| setting(family, "lo", "forwarding") == Some(0));
    let host = host.map(|family| {
        format!(
            "net.{family}.conf.lo.forwarding is 0, so sockets of this host that meet no socket program reach no Service"
        )
    });
    let off = uplinks.values().flat_map(|uplink| {
        let families = ["ipv4", "ipv6"].into_iter();
        let off = families.filter(|family| setting(family, uplink, "forwarding") == Some(0));
        off.map(move |family| {
            format!(
                "net.{family}.conf.{uplink}.forwarding is 0, so packets reach only backends in the host's network"
            )
        })
    });
    off.chain(host).collect()
}

/// Returns a warning about the links on which the kernel drops replies to this host that come from the address of a Service,
/// since this address is reached by the link `default`.
pub(super) fn reverse_path(links: &BTreeMap<u32, String>, default: Option<u32>) -> Option<String> {
    // The larger value of both is in effect (Documentation/networking/ip-sysctl.rst).
    let of_all = setting("ipv4", "all", "rp_filter").unwrap_or_default();
    let is_strict = |(index, link): &(&u32, &String)| {
        let own = setting("ipv4", link, "rp_filter").unwrap_or_default();
        Some(**index) != default && own.max(of_all) == STRICT
    };
    let mut strict = links.iter().filter(is_strict);
    let (_, first) = strict.next()?;
    let others = match strict.count() {
        0 => String::new(),
        count => format!(" (and of {count} other links)"),
    };
    Some(format!(
        "net.ipv4.conf.{first}.rp_filter is 1{others}, so replies to sockets of this host that meet no socket program are dropped \
         there, unless the route to the Service leads to this link; the value 2 admits them"
    ))
}

/// Returns a setting of a link, if the kernel has it.
fn setting(family: &str, link: &str, name: &str) -> Option<u32> {
    let path = format!("/proc/sys/net/{family}/conf/{link}/{name}");
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
