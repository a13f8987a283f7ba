//! Decides about the first packet of a flow as the tc programs do, on the maps in memory.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use tunnel_common::{
    addr::{Address, Port},
    affinity::{Affinity, AffinityKey},
    decide::{Maps, Traffic},
    flow::{Flow, FlowKey, Seen, Timeouts},
    forward::{Flows, Insertion, Run, Steering, Step, steps},
    locality,
    packet::{Family, Packet, TcpFlags},
    packet_link::PacketLink,
    reason::Reason,
    service::{self, FrontendKey, SourceRange},
    service_range::ServiceRange,
    steering::Prefix,
};
use tunnel_reference::{LocalNode, LocalSenders, Verdict, address::Cidr};
use zerocopy::FromZeros as _;

use crate::memory::Memory;

/// Implements `Maps` and the part of `Flows` that chooses a backend for the maps in memory. Both the random number and the
/// round-robin counter are always the number of the slot to try.
pub(crate) struct MapsInMemory<'a> {
    maps: &'a Memory,
    pub(crate) slot: Cell<u32>,
    run: RefCell<Run>,
    link: PacketLink,
    local_ranges: Vec<SourceRange>,
    masquerades_all: bool,
}

/// The link on which a packet arrives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Link {
    Uplink,
    OfPod,
}

impl Link {
    /// Returns what the programs know about the link.
    fn known(self, here: &LocalNode) -> PacketLink {
        let flags = match (self, &here.local_senders) {
            (Self::Uplink, _) => 0,
            (Self::OfPod, LocalSenders::BehindLinks) => {
                PacketLink::LEADS_TO_PODS | PacketLink::LOCAL_SENDERS
            }
            (Self::OfPod, LocalSenders::InRanges(_)) => {
                PacketLink::LEADS_TO_PODS | PacketLink::PRESUMED_LOCAL
            }
        };
        PacketLink {
            v4: Address::UNSPECIFIED,
            v6: Address::UNSPECIFIED,
            flags,
        }
    }
}

impl<'a> MapsInMemory<'a> {
    pub(crate) fn new(maps: &'a Memory, link: Link, here: &LocalNode) -> Self {
        Self {
            link: link.known(here),
            maps,
            slot: Cell::new(0),
            run: RefCell::new(Run::new_zeroed()),
            local_ranges: local_ranges(&here.local_senders),
            masquerades_all: here.masquerade_all,
        }
    }
}

fn local_ranges(senders: &LocalSenders) -> Vec<SourceRange> {
    let of_range = |range: &Cidr| {
        let length = u8::try_from(range.length()).expect("a length");
        let prefix = Prefix::new(Address::from_ip(range.address()), length);
        SourceRange::of_prefix(&prefix.expect("a range"))
    };
    match senders {
        LocalSenders::InRanges(ranges) => ranges.iter().map(of_range).collect(),
        LocalSenders::BehindLinks => [true, false].map(locality::nobody).to_vec(),
    }
}

impl Maps for MapsInMemory<'_> {
    fn frontend_index(&self, key: &FrontendKey) -> Option<u32> {
        self.maps.frontend_keys.get(key).copied()
    }

    fn frontend(&self, index: u32) -> Option<&service::Frontend> {
        self.maps.frontends.get(&index)
    }

    fn slot(&self, index: u32) -> Option<&service::Slot> {
        self.maps.slots.get(&index)
    }

    fn source_range(&self, index: u32) -> Option<&SourceRange> {
        self.maps.source_ranges.get(&index)
    }

    fn backend(&self, index: u32) -> Option<&service::Backend> {
        self.maps.backends.get(&index)
    }

    fn affinity(&self, _: &AffinityKey) -> Option<&Affinity> {
        None
    }

    fn insert_affinity(&self, _: &Affinity, _: bool) -> bool {
        true
    }

    fn open_connections(&self, _: u32) -> u64 {
        0
    }

    fn next_round_robin(&self, _: u32) -> Option<u32> {
        Some(self.slot.get())
    }

    fn random(&self) -> u32 {
        self.slot.get()
    }

    fn now(&self) -> u64 {
        0
    }
}

/// Nothing is steered.
impl Steering for MapsInMemory<'_> {}

/// The programs look up and insert flows only before and after the choice of a backend.
impl Flows for MapsInMemory<'_> {
    fn with_run<R>(&self, work: impl FnOnce(&mut Run) -> R) -> Option<R> {
        Some(work(&mut self.run.borrow_mut()))
    }

    fn flow(&self, _: &FlowKey) -> Option<&Flow> {
        None
    }

    fn copy_flow(&self, flow: &Flow, copy: &mut Flow) {
        *copy = *flow;
    }

    fn insert_flow(&self, _: &Flow, _: bool) -> Insertion {
        Insertion::Full
    }

    fn touch_flow(&self, _: &Flow, _: Seen, _: u32) {}

    fn expect(&self, _: &Flow, _: u16) {}

    fn end_flow(&self, _: &Flow) {}

    fn remove_flow(&self, _: &FlowKey) -> bool {
        false
    }

    fn recent_flow(&self, _: u32) -> Option<&FlowKey> {
        None
    }

    fn recent_index(&self, _: bool, _: u32) -> u32 {
        0
    }

    fn record_recent_flow(&self, _: &FlowKey) {}

    fn count(&self, _: Reason) {}

    fn seconds(&self) -> u32 {
        0
    }

    fn is_frozen(&self) -> bool {
        false
    }

    fn timeouts(&self) -> Timeouts {
        Timeouts::DEFAULT
    }

    fn local_range(&self, index: u32) -> Option<&SourceRange> {
        self.local_ranges.get(usize::try_from(index).ok()?)
    }

    /// The model leaves packets to addresses and ports of no frontend alone.
    fn service_range(&self, _: u32) -> Option<&ServiceRange> {
        None
    }

    fn packet_link(&self, _: u32) -> Option<&PacketLink> {
        Some(&self.link)
    }

    fn masquerades_all(&self) -> bool {
        self.masquerades_all
    }

    fn may_keep_port(&self, _: Port) -> bool {
        true
    }

    fn port_at(&self, _: u32) -> Port {
        Port::from_host(1024)
    }
}

/// Returns the verdict on a packet that begins a flow, and the backends to which it leaves with the node's address. The
/// decision is made once for each slot in the backend set.
pub(crate) fn decide(
    maps: &Memory,
    key: &FrontendKey,
    (source, link): (IpAddr, Link),
    here: &LocalNode,
) -> (Verdict, BTreeSet<SocketAddr>) {
    let maps_in_memory = MapsInMemory::new(maps, link, here);
    let record = maps
        .frontend_keys
        .get(key)
        .and_then(|index| maps.frontends.get(index));
    let len = |traffic: Traffic| record.map_or(0, |record| traffic.set(record).len);
    // The packets of pods use either set.
    let slots = len(Traffic::Packets).max(len(Traffic::PodPackets));
    let packet = Packet {
        family: if source.is_ipv4() {
            Family::V4
        } else {
            Family::V6
        },
        source: Address::from_ip(source),
        destination: key.address,
        source_port: Port::from_host(40_000),
        destination_port: key.port,
        protocol: key.protocol,
        flags: TcpFlags::default(),
        transport_offset: 0,
        is_fragment: false,
    };
    let (mut backends, mut masqueraded) = (BTreeSet::new(), BTreeSet::new());
    for slot in 0..slots.max(1) {
        maps_in_memory.slot.set(slot);
        {
            let mut run = maps_in_memory.run.borrow_mut();
            run.start(&packet, 0);
            // Any link, but not this host itself.
            run.link = PacketLink::HOST + 1;
        }
        let step = steps::choose(&maps_in_memory);
        let reason = Reason::from_index(maps_in_memory.run.borrow().reason);
        assert!(
            !matches!(reason, Some(Reason::RecordInvalid | Reason::RecordUnstable)),
            "the record of {key} has an invalid slot or backend, or another key"
        );
        match step {
            Step::Next => {
                let flow = maps_in_memory.run.borrow().flow;
                let (ip, port) = (flow.backend.address.to_ip(), flow.backend.port.to_host());
                backends.insert(SocketAddr::new(ip, port));
                if flow.flags & Flow::MUST_MASQUERADE != 0 {
                    masqueraded.insert(SocketAddr::new(ip, port));
                }
            }
            Step::Pass => return (Verdict::Untouched, masqueraded),
            Step::Refuse => return (Verdict::Refused, masqueraded),
            Step::Drop => return (Verdict::Dropped, masqueraded),
            step @ (Step::Translate | Step::Begin | Step::Defer) => {
                panic!("the choice for {key} ends with {step:?}")
            }
        }
    }
    (Verdict::To(backends), masqueraded)
}
