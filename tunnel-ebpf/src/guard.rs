//! The guard, which drops packets that arrive on uplinks and are addressed to steering prefixes. The
//! addresses in these prefixes are local to the node, so such packets would otherwise reach the ingress.

use aya_ebpf::programs::TcContext;
use tunnel_common::{addr::Address, reason::Reason};

use crate::{
    context::{GUARD_V4, GUARD_V6},
    event_log, maps,
    packet::{self, DROP, ETH_P_IP, ETH_P_IPV6, NEXT},
};

const ETH_P_8021Q: u16 = 0x8100;
const ETH_P_8021AD: u16 = 0x88a8;

/// The size in bytes of a VLAN tag and the protocol number after it (IEEE 802.1Q section 9).
const TAG_SIZE: u32 = 4;
/// The maximum number of VLAN tags to skip.
const MAX_TAGS: u32 = 8;

/// The offsets of the destination address in IPv4 and IPv6 headers (RFC 791 section 3.1, RFC 8200 section 3).
const DESTINATION_V4: u32 = 16;
const DESTINATION_V6: u32 = 24;

/// Drops a packet addressed to a steering prefix, and passes any other packet on to the next program.
#[inline(always)]
pub(crate) fn filter(ctx: &TcContext) -> i32 {
    let (mut protocol, mut header) = (packet::protocol(ctx), 0);
    // The kernel accepts any number of tags with VLAN ID 0, but removes only the first one before this hook
    // runs (`check_vlan_id` in `__netif_receive_skb_core`, net/core/dev.c). MAX_TAGS bounds the loop, as the
    // verifier requires.
    for _ in 0..MAX_TAGS {
        if !is_tag(protocol) {
            break;
        }
        let Some([tag]) = packet::load_words::<1>(ctx, header) else {
            return NEXT;
        };
        protocol = packet::low_half(tag);
        header += TAG_SIZE;
    }
    let is_dropped = match protocol {
        ETH_P_IP => packet::load_words::<1>(ctx, header + DESTINATION_V4).is_some_and(|to| {
            let is_dropped = is_in_prefix_v4(&to);
            if is_dropped {
                event_log::dropped(Address::from_v4_word(to[0]));
            }
            is_dropped
        }),
        ETH_P_IPV6 => packet::load_words::<4>(ctx, header + DESTINATION_V6).is_some_and(|to| {
            let is_dropped = is_in_prefix_v6(&to);
            if is_dropped {
                event_log::dropped(Address::from_words(to));
            }
            is_dropped
        }),
        // Drops packets with even more tags: no network needs that many, and the destination address after
        // them is unknown.
        protocol => is_tag(protocol),
    };
    if is_dropped {
        maps::count_reason(Reason::GuardDropped);
        return DROP;
    }
    NEXT
}

#[inline(always)]
const fn is_tag(protocol: u16) -> bool {
    matches!(protocol, ETH_P_8021Q | ETH_P_8021AD)
}

#[inline(always)]
fn is_in_prefix_v4([to]: &[u32; 1]) -> bool {
    let [network, mask] = &GUARD_V4;
    to & mask.load() == network.load()
}

#[inline(always)]
fn is_in_prefix_v6([a, b, c, d]: &[u32; 4]) -> bool {
    let [n0, n1, n2, n3, m0, m1, m2, m3] = &GUARD_V6;
    a & m0.load() == n0.load()
        && b & m1.load() == n1.load()
        && c & m2.load() == n2.load()
        && d & m3.load() == n3.load()
}
