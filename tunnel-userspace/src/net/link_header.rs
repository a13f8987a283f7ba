//! The link-layer headers of packets.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "most of the kernel's types of links have a header of their own"
)]

use std::{fs, sync::LazyLock};

use rtnetlink::packet_route::link::LinkLayerType;

/// The link-layer header of the packets of a link, as tc programs see it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LinkHeader {
    /// An Ethernet header.
    Ethernet,
    /// No header, as on links of WireGuard and PPP.
    Absent,
    /// Another header.
    Other,
}

impl LinkHeader {
    /// Returns the header on links of a type, as the running kernel shows it.
    pub(super) fn of(link: LinkLayerType) -> Self {
        static SHOW_NO_HEADER: LazyLock<bool> = LazyLock::new(|| {
            let release = fs::read_to_string("/proc/sys/kernel/osrelease");
            release.is_ok_and(|release| tunnels_show_no_header(&release))
        });
        Self::with_tunnels(link, *SHOW_NO_HEADER)
    }

    /// Returns the header on links of a type (`dev_is_mac_header_xmit` in the kernel's include/linux/if_arp.h).
    const fn with_tunnels(link: LinkLayerType, show_no_header: bool) -> Self {
        match link {
            LinkLayerType::Ether => Self::Ethernet,
            LinkLayerType::Tunnel
            | LinkLayerType::Tunnel6
            | LinkLayerType::Sit
            | LinkLayerType::Ipgre
            | LinkLayerType::Ip6gre
                if !show_no_header =>
            {
                Self::Other
            }
            LinkLayerType::Tunnel
            | LinkLayerType::Tunnel6
            | LinkLayerType::Sit
            | LinkLayerType::Ipgre
            | LinkLayerType::Ip6gre
            | LinkLayerType::Void
            | LinkLayerType::None
            | LinkLayerType::Rawip
            | LinkLayerType::Ppp => Self::Absent,
            _ => Self::Other,
        }
    }
}

/// Returns true if packets that arrive through an IP tunnel have no header at tc ingress. Before Linux 5.14, the header of the
/// tunnel, whose length differs, comes first there (the kernel's commits "reset mac header when redirecting L3 packets").
fn tunnels_show_no_header(release: &str) -> bool {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit());
    let mut next = || numbers.next()?.parse::<u32>().ok();
    next().zip(next()) >= Some((5, 14))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunnels_have_a_header_before_linux_5_14() {
        for (release, expected) in [
            ("5.10.0-46-cloud-amd64", LinkHeader::Other),
            ("5.13.19", LinkHeader::Other),
            ("5.14.0-503.el9.x86_64", LinkHeader::Absent),
            ("6.1.0-56-cloud-amd64", LinkHeader::Absent),
            ("7.0-rc1", LinkHeader::Absent),
            ("", LinkHeader::Other),
        ] {
            let has_none = tunnels_show_no_header(release);
            let found = LinkHeader::with_tunnels(LinkLayerType::Sit, has_none);
            assert_eq!(found, expected, "{release}");
            let found = LinkHeader::with_tunnels(LinkLayerType::None, has_none);
            assert_eq!(found, LinkHeader::Absent, "{release}");
        }
    }
}
