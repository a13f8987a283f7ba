//! Looks up routes, and sends packets by them past the network stack.

use core::{
    mem::{offset_of, zeroed},
    ptr,
};

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_fib_lookup as FibLookup, bpf_redir_neigh as NextHop},
    helpers::generated::{
        bpf_fib_lookup, bpf_l3_csum_replace, bpf_redirect_neigh, bpf_skb_change_head,
    },
    programs::TcContext,
};
use tunnel_common::{addr::Protocol, flow::Endpoint, packet::Family, rewrite::PacketEdits as _};

use super::{
    BPF_F_RECOMPUTE_CSUM, DROP, Edits, NotWritable, check, load_words, network_header, read_context,
};

/// The traffic class and flow label in the first word of an IPv6 header.
const FLOW_INFO: u32 = 0x0fff_ffff;

/// The address families in a route lookup.
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// The packet to which a route is looked up.
pub(crate) struct Query {
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
    pub(crate) protocol: Protocol,
    /// The length from the network header, or 0 if the kernel need not compare it with the MTU of the route (Linux 5.12).
    pub(crate) length: u16,
}

/// The way of a packet: the result of a route lookup.
pub(crate) struct Route(FibLookup);

impl Route {
    /// Looks up the route of a packet that arrives on a link. Also returns the kernel's result (`BPF_FIB_LKUP_RET_…`).
    #[inline(always)]
    pub(crate) fn find(ctx: &TcContext, link: u32, query: &Query) -> (Self, i64) {
        // SAFETY: every bit pattern is valid.
        let mut lookup: FibLookup = unsafe { zeroed() };
        let [first] = load_words::<1>(ctx, 0).unwrap_or_default();
        if query.source.address.is_v4() {
            let [_, tos, _, _] = first.to_ne_bytes();
            lookup.family = AF_INET;
            lookup.__bindgen_anon_2.tos = tos;
            lookup.__bindgen_anon_3.ipv4_src = query.source.address.v4_word();
            lookup.__bindgen_anon_4.ipv4_dst = query.destination.address.v4_word();
        } else {
            lookup.family = AF_INET6;
            lookup.__bindgen_anon_2.flowinfo = first & FLOW_INFO.to_be();
            lookup.__bindgen_anon_3.ipv6_src = query.source.address.words();
            lookup.__bindgen_anon_4.ipv6_dst = query.destination.address.words();
        }
        lookup.l4_protocol = query.protocol.number();
        lookup.sport = query.source.port.to_network();
        lookup.dport = query.destination.port.to_network();
        lookup.__bindgen_anon_1.tot_len = query.length;
        lookup.ifindex = link;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "64 bytes"
        )]
        let size = size_of::<FibLookup>() as i32;
        // SAFETY: the lookup has this size.
        let result = unsafe { bpf_fib_lookup(ctx.as_ptr(), &raw mut lookup, size, 0) };
        (Self(lookup), result)
    }

    /// Returns the index of the link by which the packet leaves.
    #[inline(always)]
    pub(crate) const fn link(&self) -> u32 {
        self.0.ifindex
    }

    /// Sends the packet by the route. Returns the verdict.
    #[inline(always)]
    pub(crate) fn send(&self) -> i32 {
        // SAFETY: the lookup has filled in the next hop. An IPv4 address is the first word of the field.
        let address = unsafe { self.0.__bindgen_anon_4.ipv6_dst };
        // SAFETY: every bit pattern is valid.
        let mut hop: NextHop = unsafe { zeroed() };
        hop.nh_family = self.0.family.into();
        hop.__bindgen_anon_1.ipv6_nh = address;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "20 bytes"
        )]
        let size = size_of::<NextHop>() as i32;
        // SAFETY: the next hop has this size.
        let verdict = unsafe { bpf_redirect_neigh(self.link(), &raw mut hop, size, 0) };
        i32::try_from(verdict).unwrap_or(DROP)
    }
}

/// Gives a packet that is about to leave by a link the header that the kernel needs to redirect it.
#[inline(always)]
pub(crate) fn prepare(ctx: &TcContext) -> Result<(), NotWritable> {
    /// The size of the header that the packet gets on a link without an Ethernet header, because the kernel redirects none
    /// without one. It is removed again.
    const HEADER: u32 = 14;
    if network_header() == 0 {
        // SAFETY: the helper takes any size.
        check(unsafe { bpf_skb_change_head(ctx.skb.skb, HEADER, 0) })?;
    }
    Ok(())
}

/// Sends a packet by a link. The kernel looks up the next hop, which a tunnel to several hosts needs. Returns the verdict.
#[inline(always)]
pub(crate) fn send_by(link: u32) -> i32 {
    // SAFETY: the helper takes any link.
    let verdict = unsafe { bpf_redirect_neigh(link, ptr::null_mut(), 0, 0) };
    i32::try_from(verdict).unwrap_or(DROP)
}

/// Returns the length of a packet from the network header. If the packet stands for several segments, returns that of one of them.
#[inline(always)]
pub(crate) fn length(ctx: &TcContext, protocol: Protocol, transport: u32) -> u16 {
    /// The size of a UDP header.
    const UDP_HEADER: u32 = 8;
    /// The offset in a TCP header of the byte with the header's length, in words of 4 bytes, in the upper half.
    const TCP_LENGTH: u32 = 12;
    let segment = read_context(ctx, offset_of!(__sk_buff, gso_size));
    let length = if segment == 0 {
        read_context(ctx, offset_of!(__sk_buff, len)).wrapping_sub(network_header())
    } else {
        let header = if protocol.is_tcp() {
            let word = Edits(ctx).half(transport + TCP_LENGTH).unwrap_or_default();
            let [length, _] = word.to_ne_bytes();
            u32::from(length >> 4) * 4
        } else {
            UDP_HEADER
        };
        transport + header + segment
    };
    u16::try_from(length).unwrap_or(u16::MAX)
}

/// The field with the number of routers that a packet may still pass (TTL, or hop limit).
pub(crate) struct HopLimit {
    family: Family,
    /// The 16-bit word that contains the field.
    word: u16,
}

impl HopLimit {
    /// Reads the field. Returns `None` if the packet may pass no router any more.
    #[inline(always)]
    pub(crate) fn read(ctx: &TcContext, family: Family) -> Option<Self> {
        let word = Edits(ctx).half(Self::offset(family)).ok()?;
        let limit = Self { family, word };
        (limit.number() > 1).then_some(limit)
    }

    /// Returns the offset of the word from the network header.
    #[inline(always)]
    const fn offset(family: Family) -> u32 {
        match family {
            Family::V4 => 8,
            Family::V6 => 6,
        }
    }

    #[inline(always)]
    const fn number(&self) -> u8 {
        let [first, second] = self.word.to_ne_bytes();
        match self.family {
            Family::V4 => first,
            Family::V6 => second,
        }
    }

    /// Subtracts one router.
    #[inline(always)]
    pub(crate) fn decrease(&self, ctx: &TcContext) -> Result<(), NotWritable> {
        let [first, second] = self.word.to_ne_bytes();
        let edits = Edits(ctx);
        let offset = Self::offset(self.family);
        match self.family {
            Family::V4 => {
                /// The offset of the checksum in an IPv4 header.
                const CHECKSUM: u32 = 10;
                let word = u16::from_ne_bytes([first.wrapping_sub(1), second]);
                let at = network_header() + CHECKSUM;
                let (from, to) = (u64::from(self.word), u64::from(word));
                // SAFETY: the helper checks the packet's bounds.
                check(unsafe { bpf_l3_csum_replace(ctx.skb.skb, at, from, to, 2) })?;
                edits.store(offset, &word, 0)
            }
            Family::V6 => {
                let word = u16::from_ne_bytes([first, second.wrapping_sub(1)]);
                // A sum of the packet that the network card has computed changes, too (`CHECKSUM_COMPLETE`).
                edits.store(offset, &word, u64::from(BPF_F_RECOMPUTE_CSUM))
            }
        }
    }
}
