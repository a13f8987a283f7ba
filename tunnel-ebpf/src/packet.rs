//! Reads and changes packets in tc programs, with bounds checks.
#![expect(unsafe_code, reason = "packets are accessed by BPF helpers")]

pub(crate) mod answer;
pub(crate) mod route;
mod sctp;

use core::{
    array,
    mem::{MaybeUninit, offset_of, zeroed},
    ptr,
};

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM,
        bpf_hdr_start_off::BPF_HDR_START_NET, bpf_sock_tuple,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 as SockTupleV4,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2 as SockTupleV6,
    },
    helpers::generated::{
        bpf_l4_csum_replace, bpf_redirect, bpf_sk_lookup_udp, bpf_sk_release,
        bpf_skb_load_bytes_relative, bpf_skb_store_bytes, bpf_skc_lookup_tcp,
    },
    programs::TcContext,
};
use tunnel_common::{
    addr::{Address, Protocol},
    flow::Endpoint,
    forward::Flows as _,
    packet::{
        Family, PacketBytes, TcpNumbers, Unread,
        extensions::{MAX_OFFSET, Walk},
    },
    rewrite::{Difference, PacketEdits, TransportChecksum},
};

use crate::{context, maps::KernelMaps};

/// The return value that passes the packet on to the next program (`TC_ACT_UNSPEC`, the same as `TCX_NEXT`).
pub(crate) const NEXT: i32 = -1;
/// The return value that drops the packet (`TC_ACT_SHOT`, the same as `TCX_DROP`).
pub(crate) const DROP: i32 = 2;

pub(crate) const ETH_P_IP: u16 = 0x0800;
pub(crate) const ETH_P_IPV6: u16 = 0x86dd;

/// `PACKET_HOST`: the link layer has addressed the packet to this host.
const PACKET_HOST: u32 = 0;
/// The bits of `vlan_tci` that are the number of the VLAN (`VLAN_VID_MASK` in include/linux/if_vlan.h).
const VLAN_NUMBER: u32 = 0xfff;

/// The offset of the network header in packets: 14 on links with Ethernet headers, where VLAN tags are not in the packet, and
/// 0 on others. Set by the loader, since the kernel doesn't show it.
#[unsafe(no_mangle)]
static LINK_HEADER: Global<u32> = Global::new(14);

/// Returns the offset of the network header.
#[inline(always)]
fn network_header() -> u32 {
    LINK_HEADER.load()
}

/// Reads a word of the context.
#[inline(always)]
fn read_context(ctx: &TcContext, offset: usize) -> u32 {
    let start = ctx.skb.skb.cast::<u32>();
    // SAFETY: the context is a valid `__sk_buff`, and the offset is one of its 32-bit fields.
    unsafe { start.wrapping_byte_add(offset).read_volatile() }
}

/// Returns the IP version of a packet.
#[inline(always)]
pub(crate) fn family(ctx: &TcContext) -> Result<Family, Unread> {
    match protocol(ctx) {
        ETH_P_IP => Ok(Family::V4),
        ETH_P_IPV6 => Ok(Family::V6),
        _ => Err(Unread::OtherProtocol),
    }
}

/// Returns true if a packet that arrives is for this host, and for the link that it arrives on. The link layer also hands
/// over packets for others, such as broadcasts, and those of its VLANs, which have links of their own.
#[inline(always)]
pub(crate) fn is_for_this_host(ctx: &TcContext) -> bool {
    read_context(ctx, offset_of!(__sk_buff, pkt_type)) == PACKET_HOST && !has_tag(ctx)
}

/// Returns true if a packet has the tag of a VLAN. A tag with the number 0 only contains a priority (IEEE 802.1Q).
#[inline(always)]
pub(crate) fn has_tag(ctx: &TcContext) -> bool {
    read_context(ctx, offset_of!(__sk_buff, vlan_present)) != 0
        && read_context(ctx, offset_of!(__sk_buff, vlan_tci)) & VLAN_NUMBER != 0
}

/// Makes a packet arrive once more at its link, after those that have arrived meanwhile. Returns the verdict.
#[inline(always)]
pub(crate) fn arrive_again(ctx: &TcContext) -> i32 {
    // SAFETY: the helper takes any link.
    let verdict = unsafe { bpf_redirect(link(ctx), u64::from(BPF_F_INGRESS)) };
    i32::try_from(verdict).unwrap_or(DROP)
}

/// Returns the index of the link that a packet arrives on or leaves by.
#[inline(always)]
pub(crate) fn link(ctx: &TcContext) -> u32 {
    read_context(ctx, offset_of!(__sk_buff, ifindex))
}

/// Returns true if a packet leaves by the link that it has arrived on.
#[inline(always)]
pub(crate) fn returns(ctx: &TcContext) -> bool {
    read_context(ctx, offset_of!(__sk_buff, ingress_ifindex)) == link(ctx)
}

/// Returns true if a packet that leaves was sent by this host, but not by the daemon itself, whose probes show that the socket
/// programs work.
#[inline(always)]
pub(crate) fn is_of_host(ctx: &TcContext) -> bool {
    let mark = read_context(ctx, offset_of!(__sk_buff, mark));
    read_context(ctx, offset_of!(__sk_buff, ingress_ifindex)) == 0 && !context::is_own_mark(mark)
}

/// Returns true if a socket of this node would receive packets from `from` to `to`: a connected socket, a listener, or a
/// UDP socket that is bound to the port.
#[inline(always)]
pub(crate) fn has_socket(
    ctx: &TcContext,
    protocol: Protocol,
    to: &Endpoint,
    from: &Endpoint,
) -> bool {
    // SAFETY: every bit pattern is valid.
    let mut tuple: bpf_sock_tuple = unsafe { zeroed() };
    let is_v4 = to.address.is_v4();
    let length = if is_v4 {
        tuple.__bindgen_anon_1.ipv4 = SockTupleV4 {
            saddr: from.address.v4_word(),
            daddr: to.address.v4_word(),
            sport: from.port.to_network(),
            dport: to.port.to_network(),
        };
        12
    } else {
        tuple.__bindgen_anon_1.ipv6 = SockTupleV6 {
            saddr: from.address.words(),
            daddr: to.address.words(),
            sport: from.port.to_network(),
            dport: to.port.to_network(),
        };
        36
    };
    let tuple = &raw mut tuple;
    if protocol == Protocol::SCTP {
        // The kernel has no helper that finds sockets of SCTP.
        return false;
    }
    let sock = if protocol.is_tcp() {
        // SAFETY: the tuple has at least this length.
        unsafe { bpf_skc_lookup_tcp(ctx.as_ptr(), tuple, length, CURRENT_NAMESPACE, 0) }
    } else {
        // SAFETY: as above.
        unsafe { bpf_sk_lookup_udp(ctx.as_ptr(), tuple, length, CURRENT_NAMESPACE, 0) }
    };
    if sock.is_null() {
        return false;
    }
    // SAFETY: the helper has returned this socket.
    unsafe { bpf_sk_release(sock.cast()) };
    true
}

/// `BPF_F_CURRENT_NETNS`: the network namespace of the packet's link.
const CURRENT_NAMESPACE: u64 = u64::MAX;

/// The bytes of a packet.
pub(crate) struct Bytes<'a>(pub(crate) &'a TcContext);

impl PacketBytes for Bytes<'_> {
    #[inline(always)]
    fn words<const WORDS: usize>(&self, offset: u32) -> Option<[u32; WORDS]> {
        linear(self.0, offset).or_else(|| load(self.0, offset))
    }

    #[inline(always)]
    fn keep_numbers(&self, numbers: TcpNumbers) {
        KernelMaps.with_run(|run| run.numbers = numbers);
    }

    #[inline(always)]
    fn skip_header(&self, walk: Walk) -> Walk {
        Walk::from_number(skip_extension_header(self.0.skb.skb, walk.number()))
    }
}

/// Calls [`Walk::skip_header`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn skip_extension_header(ctx: *mut __sk_buff, walk: u64) -> u64 {
    let walk = Walk::from_number(walk);
    walk.skip_header(&Bytes(&TcContext::new(ctx))).number()
}

/// A packet that is being changed.
pub(crate) struct Edits<'a>(pub(crate) &'a TcContext);

/// The error of a packet that can't be changed, because there is no memory.
pub(crate) struct NotWritable;

/// Writes a value at an offset from the beginning of the packet.
#[inline(always)]
fn store_at<T: Copy>(
    ctx: &TcContext,
    offset: u32,
    value: &T,
    flags: u64,
) -> Result<(), NotWritable> {
    #[expect(clippy::cast_possible_truncation, reason = "a few bytes")]
    let length = size_of::<T>() as u32;
    let value = ptr::from_ref(value).cast();
    // SAFETY: the helper checks the packet's bounds, and reads `length` bytes of the value.
    check(unsafe { bpf_skb_store_bytes(ctx.skb.skb, offset, value, length, flags) })
}

impl Edits<'_> {
    /// Writes a value at an offset from the network header.
    #[inline(always)]
    fn store<T: Copy>(&self, offset: u32, value: &T, flags: u64) -> Result<(), NotWritable> {
        store_at(self.0, network_header() + offset, value, flags)
    }

    #[inline(always)]
    fn update(
        &self,
        checksum: TransportChecksum,
        by: Difference,
        flags: u64,
    ) -> Result<(), NotWritable> {
        let flags = if checksum.zero_means_none {
            flags | u64::from(BPF_F_MARK_MANGLED_0)
        } else {
            flags
        };
        let offset = network_header() + checksum.offset;
        // SAFETY: the helper checks the packet's bounds.
        check(unsafe {
            bpf_l4_csum_replace(self.0.skb.skb, offset, 0, u64::from(by.word()), flags)
        })
    }
}

#[inline(always)]
const fn check(result: i64) -> Result<(), NotWritable> {
    if result == 0 {
        Ok(())
    } else {
        Err(NotWritable)
    }
}

impl PacketEdits for Edits<'_> {
    type Error = NotWritable;

    #[inline(always)]
    fn update_for_addresses(
        &mut self,
        checksum: TransportChecksum,
        by: Difference,
    ) -> Result<(), NotWritable> {
        self.update(checksum, by, u64::from(BPF_F_PSEUDO_HDR))
    }

    #[inline(always)]
    fn update_for_ports(
        &mut self,
        checksum: TransportChecksum,
        by: Difference,
    ) -> Result<(), NotWritable> {
        self.update(checksum, by, 0)
    }

    #[inline(always)]
    fn update_sctp(&mut self, offset: u32, change: u32) -> Result<(), NotWritable> {
        match sctp::update_sctp_checksum(self.0.skb.skb, offset, change) {
            0 => Ok(()),
            _ => Err(NotWritable),
        }
    }

    #[inline(always)]
    fn half(&self, offset: u32) -> Result<u16, NotWritable> {
        /// A mask that shows the verifier a bound. No header has this offset.
        const MASK: u32 = 4 * (MAX_OFFSET + 1) - 1;
        linear(self.0, offset & MASK)
            .or_else(|| load(self.0, offset))
            .map(|[half]| half)
            .ok_or(NotWritable)
    }

    #[inline(always)]
    fn write<const HALVES: usize>(
        &mut self,
        offset: u32,
        halves: [u16; HALVES],
    ) -> Result<(), NotWritable> {
        self.store(offset, &halves, 0)
    }

    #[inline(always)]
    fn write_address_v6(&mut self, offset: u32, address: Address) -> Result<(), NotWritable> {
        self.store(offset, &address.words(), u64::from(BPF_F_RECOMPUTE_CSUM))
    }
}

/// Returns a packet's network-layer protocol (`ETH_P_…`) in host byte order.
#[inline(always)]
pub(crate) fn protocol(ctx: &TcContext) -> u16 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the protocol is in the first two bytes, in network byte order"
    )]
    u16::from_be(ctx.skb.protocol() as u16)
}

/// Returns the last two bytes of a word from a packet, in host byte order.
#[inline(always)]
pub(crate) const fn low_half(word: u32) -> u16 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "only the low half is wanted"
    )]
    let half = u32::from_be(word) as u16;
    half
}

/// Reads words at an offset from the network header, in network byte order. Returns `None` if the packet is too short.
#[inline(always)]
pub(crate) fn load_words<const WORDS: usize>(ctx: &TcContext, offset: u32) -> Option<[u32; WORDS]> {
    load(ctx, offset)
}

/// Reads values at an offset from the network header, without a helper. Returns `None` if they are not in the linear part of
/// the packet.
#[inline(always)]
fn linear<T: Copy, const COUNT: usize>(ctx: &TcContext, offset: u32) -> Option<[T; COUNT]> {
    let start = ctx.data() + (network_header() + offset) as usize;
    if start + size_of::<[T; COUNT]>() > ctx.data_end() {
        return None;
    }
    let values = start as *const T;
    Some(array::from_fn(|index| {
        // SAFETY: the value is in the packet. The verifier admits values that are not aligned if the CPU does.
        unsafe { values.wrapping_add(index).read_volatile() }
    }))
}

/// Reads values at an offset from the network header. Returns `None` if the packet is too short.
#[inline(always)]
fn load<T: Copy, const COUNT: usize>(ctx: &TcContext, offset: u32) -> Option<[T; COUNT]> {
    // Zeroing the values would be a loop over their bytes, which costs as much as the rest.
    let mut values = MaybeUninit::<[T; COUNT]>::uninit();
    #[expect(clippy::cast_possible_truncation, reason = "a few words")]
    let length = size_of::<[T; COUNT]>() as u32;
    // SAFETY: the helper checks the packet's bounds, and writes either exactly `length` bytes or none.
    let failed = unsafe {
        bpf_skb_load_bytes_relative(
            ctx.as_ptr(),
            offset,
            values.as_mut_ptr().cast(),
            length,
            BPF_HDR_START_NET,
        )
    };
    if failed != 0 {
        return None;
    }
    // SAFETY: the helper has written all values, for which every bit pattern is valid.
    Some(unsafe { values.assume_init() })
}
