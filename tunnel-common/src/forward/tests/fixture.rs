//! A node in memory, and a client outside that sends packets through it.

use core::{
    cell::{Cell, RefCell},
    net::IpAddr,
};
use std::collections::BTreeMap;

use zerocopy::FromZeros as _;

pub(super) use super::client::Client;
use super::{super::*, steering::SteeringMaps};
use crate::{
    addr::Protocol,
    affinity::{Affinity, AffinityKey},
    fragment::FragmentRecord,
    packet::{Family, Packet, TcpFlags, TcpNumbers},
    service::{
        Algorithm, Backend, BackendState, Frontend, FrontendKey, IndexRange, InlineBackend, Slot,
        SourceRange,
    },
};

pub(super) const SYN: u8 = 0x02;
pub(super) const ACK: u8 = 0x10;
pub(super) const FIN: u8 = 0x11;
pub(super) const RST: u8 = 0x04;

pub(super) fn endpoint(text: &str) -> Endpoint {
    let (ip, port) = text.rsplit_once(':').expect("an address and a port");
    let ip: IpAddr = ip.trim_matches(['[', ']']).parse().expect("an address");
    Endpoint::new(
        Address::from_ip(ip),
        Port::from_host(port.parse().expect("a port")),
    )
}

pub(super) fn text_of(endpoint: Endpoint) -> String {
    format!("{}:{}", endpoint.address.to_ip(), endpoint.port.to_host())
}

/// A node with frontends, whose backends are on other nodes or on this one.
pub(super) struct Node {
    pub(super) frontends: Vec<Frontend>,
    backends: RefCell<Vec<&'static Backend>>,
    flows: RefCell<BTreeMap<Vec<u8>, &'static Flow>>,
    /// The maximum number of entries.
    pub(super) capacity: Cell<usize>,
    /// The number of insertions that succeed before there is no memory for others, and the number of those that then fail.
    pub(super) unallocated: Cell<(u32, u32)>,
    /// The ports of the node that are in use by sockets.
    pub(super) taken: RefCell<Vec<u16>>,
    pub(super) masquerades_all: bool,
    pub(super) is_frozen: Cell<bool>,
    /// The number of ports that may stand for clients. They begin at 1024.
    pub(super) ports: u16,
    pub(super) local_ranges: Vec<SourceRange>,
    pub(super) service_ranges: Vec<ServiceRange>,
    pub(super) steering: SteeringMaps,
    /// True if packets leave by the link that they have arrived on.
    pub(super) returns: Cell<bool>,
    /// The flags of the link on which packets arrive, and by which they leave.
    pub(super) link_flags: Cell<[u32; 2]>,
    /// The values of `services` for addresses.
    pub(super) addresses: Vec<(Address, u32)>,
    pub(super) now: Cell<u32>,
    pub(super) counted: RefCell<Vec<Reason>>,
    /// The numbers of TCP packets.
    pub(super) numbers_of_packets: Cell<TcpNumbers>,
    numbers: Cell<u32>,
    run: RefCell<Run>,
    recent: RefCell<Vec<&'static FlowKey>>,
    pub(super) fragments: RefCell<Vec<FragmentRecord>>,
}

/// The address of the node on the link to other nodes.
pub(super) const NODE: &str = "192.0.2.10";

impl Node {
    /// Creates a node with a frontend for each address. All of them have the same backends, on port 8080.
    pub(super) fn new(frontends: &[&str], backends: &[&str], protocol: Protocol) -> Self {
        let slots = u32::try_from(backends.len()).expect("few");
        let frontends = (1..).zip(frontends).map(|(service, text)| {
            let at = endpoint(text);
            Frontend {
                key: FrontendKey::new(at.address, at.port, protocol),
                service,
                cluster: IndexRange::default(),
                algorithm: Algorithm::RANDOM,
                flags: Frontend::PACKETS_LOCAL,
                packet_flags: 0,
                reserved: 0,
                inline_backends: [InlineBackend::NONE; 3],
                local: IndexRange {
                    base: 0,
                    len: slots,
                },
                affinity_timeout: 0,
                source_ranges: IndexRange::default(),
            }
        });
        let node = Self {
            frontends: frontends.collect(),
            backends: RefCell::default(),
            flows: RefCell::default(),
            capacity: Cell::new(1000),
            unallocated: Cell::default(),
            taken: RefCell::default(),
            masquerades_all: false,
            is_frozen: Cell::new(false),
            ports: 64,
            local_ranges: Vec::new(),
            service_ranges: Vec::new(),
            steering: SteeringMaps::default(),
            returns: Cell::default(),
            link_flags: Cell::default(),
            addresses: Vec::new(),
            now: Cell::new(1000),
            counted: RefCell::default(),
            numbers_of_packets: Cell::default(),
            numbers: Cell::new(1),
            run: RefCell::new(Run::new_zeroed()),
            recent: RefCell::default(),
            fragments: RefCell::default(),
        };
        for text in backends {
            let at = endpoint(text);
            node.backends.borrow_mut().push(Box::leak(Box::new(Backend {
                address: at.address,
                port: at.port,
                protocol,
                flags: 0,
                service: 1,
                state: BackendState::default().next_generation(),
                sets: crate::service::Membership::CLUSTER,
            })));
        }
        node
    }

    /// Sets the flags for packets of all frontends.
    pub(super) fn set_packet_flags(&mut self, flags: u8) {
        for frontend in &mut self.frontends {
            frontend.packet_flags = flags;
        }
    }

    /// Makes the node masquerade all packets.
    pub(super) fn masquerade(&mut self) {
        self.set_packet_flags(Frontend::MASQUERADE);
    }

    pub(super) fn wait(&self, seconds: u32) {
        self.now.set(self.now.get() + seconds);
    }

    /// Removes one of two backends.
    pub(super) fn without_backend(mut self, index: usize) -> Self {
        let mut backends = self.backends.borrow_mut();
        backends[index] = Box::leak(Box::new(Backend {
            state: backends[index].state.removed(),
            ..*backends[index]
        }));
        drop(backends);
        for frontend in &mut self.frontends {
            frontend.local = IndexRange {
                base: u32::from(index == 0),
                len: 1,
            };
        }
        self
    }

    /// Returns the number of entries that have not ended.
    pub(super) fn entries(&self) -> usize {
        let flows = self.flows.borrow();
        let live = flows.values().filter(|flow| flow.flags & Flow::ENDED == 0);
        live.count()
    }

    /// Returns the entry with this key.
    pub(super) fn flow(&self, key: &FlowKey) -> Option<&'static Flow> {
        self.flows.borrow().get(&key_bytes(key)).copied()
    }

    /// Returns the state of the last run.
    pub(super) fn run(&self) -> Run {
        *self.run.borrow()
    }

    fn is_free(&self, run: &Run) -> bool {
        let port = run.flow.masquerade.port.to_host();
        !self.taken.borrow().contains(&port)
    }

    fn update(&self, flow: &Flow, change: impl FnOnce(&mut Flow)) {
        let mut flows = self.flows.borrow_mut();
        if let Some(stored) = flows.get_mut(&key_bytes(&flow.key())) {
            let mut changed = **stored;
            change(&mut changed);
            *stored = Box::leak(Box::new(changed));
        }
    }
}

fn key_bytes(key: &FlowKey) -> Vec<u8> {
    zerocopy::IntoBytes::as_bytes(key).to_vec()
}

impl decide::Maps for Node {
    fn frontend_index(&self, key: &FrontendKey) -> Option<u32> {
        let of_address = |it: &&(Address, u32)| FrontendKey::of_address(it.0) == *key;
        if let Some((_, value)) = self.addresses.iter().find(of_address) {
            return Some(*value);
        }
        let position = self.frontends.iter().position(|it| it.key == *key)?;
        u32::try_from(position).ok()
    }

    fn frontend(&self, index: u32) -> Option<&Frontend> {
        self.frontends.get(index as usize)
    }

    fn slot(&self, index: u32) -> Option<&Slot> {
        const SLOTS: [Slot; 4] = [slot(0), slot(1), slot(2), slot(3)];
        const fn slot(backend: u32) -> Slot {
            Slot { backend, share: 1 }
        }
        const { &SLOTS }.get(index as usize)
    }

    fn source_range(&self, _: u32) -> Option<&SourceRange> {
        None
    }

    fn backend(&self, index: u32) -> Option<&Backend> {
        self.backends.borrow().get(index as usize).copied()
    }

    fn affinity(&self, _: &AffinityKey) -> Option<&Affinity> {
        None
    }

    fn insert_affinity(&self, _: &Affinity, _: bool) -> bool {
        false
    }

    fn open_connections(&self, _: u32) -> u64 {
        0
    }

    fn next_round_robin(&self, _: u32) -> Option<u32> {
        None
    }

    fn random(&self) -> u32 {
        let number = self.numbers.get().wrapping_mul(1_664_525);
        self.numbers.set(number.wrapping_add(1_013_904_223));
        self.numbers.get().rotate_left(16)
    }

    fn now(&self) -> u64 {
        0
    }
}

impl Flows for Node {
    fn with_run<R>(&self, work: impl FnOnce(&mut Run) -> R) -> Option<R> {
        Some(work(&mut self.run.borrow_mut()))
    }

    fn flow(&self, key: &FlowKey) -> Option<&Flow> {
        self.flows.borrow().get(&key_bytes(key)).copied()
    }

    fn copy_flow(&self, flow: &Flow, copy: &mut Flow) {
        *copy = *flow;
    }

    fn insert_flow(&self, flow: &Flow, is_new: bool) -> Insertion {
        let mut flows = self.flows.borrow_mut();
        let key = key_bytes(&flow.key());
        let exists = flows.contains_key(&key);
        if exists && is_new {
            return Insertion::Exists;
        }
        if !exists && flows.len() >= self.capacity.get() {
            return Insertion::Full;
        }
        match self.unallocated.get() {
            (0, 0) => {}
            (0, failures) => {
                self.unallocated.set((0, failures - 1));
                return Insertion::NoMemory;
            }
            (successes, failures) => self.unallocated.set((successes - 1, failures)),
        }
        flows.insert(key, Box::leak(Box::new(*flow)));
        Insertion::Inserted
    }

    fn touch_flow(&self, flow: &Flow, seen: Seen, now: u32) {
        self.update(flow, |it| {
            (it.seen, it.last_used) = (it.seen.union(seen), now)
        });
    }

    fn expect(&self, flow: &Flow, number: u16) {
        self.update(flow, |it| it.expected = number);
    }

    fn end_flow(&self, flow: &Flow) {
        self.update(flow, |it| it.flags |= Flow::ENDED);
    }

    fn remove_flow(&self, key: &FlowKey) -> bool {
        self.flows.borrow_mut().remove(&key_bytes(key)).is_some()
    }

    fn recent_flow(&self, index: u32) -> Option<&FlowKey> {
        self.recent.borrow().get(index as usize).copied()
    }

    fn recent_index(&self, _: bool, age: u32) -> u32 {
        let length = u32::try_from(self.recent.borrow().len()).expect("few");
        (length.wrapping_sub(1).wrapping_sub(age)) % length.max(1)
    }

    fn record_recent_flow(&self, key: &FlowKey) {
        self.recent.borrow_mut().push(Box::leak(Box::new(*key)));
    }

    fn count(&self, reason: Reason) {
        self.counted.borrow_mut().push(reason);
    }

    fn seconds(&self) -> u32 {
        self.now.get()
    }

    fn is_frozen(&self) -> bool {
        self.is_frozen.get()
    }

    fn timeouts(&self) -> Timeouts {
        Timeouts::DEFAULT
    }

    fn local_range(&self, index: u32) -> Option<&SourceRange> {
        self.local_ranges.get(index as usize)
    }

    fn service_range(&self, index: u32) -> Option<&ServiceRange> {
        self.service_ranges.get(index as usize)
    }

    fn packet_link(&self, link: u32) -> Option<&PacketLink> {
        let [arriving, leaving] = self.link_flags.get();
        let flags = [PacketLink::LOCAL_SENDERS, arriving, leaving];
        Some(Box::leak(Box::new(PacketLink {
            v4: endpoint(&format!("{NODE}:0")).address,
            v6: Address::UNSPECIFIED,
            flags: flags[link as usize],
        })))
    }

    fn masquerades_all(&self) -> bool {
        self.masquerades_all
    }

    fn may_keep_port(&self, _: Port) -> bool {
        true
    }

    fn port_at(&self, place: u32) -> Port {
        let number = (u64::from(place) * u64::from(self.ports)) >> 32;
        Port::from_host(1024 + u16::try_from(number).expect("a port"))
    }
}

/// The ends of a packet.
pub(super) type Ends = (Endpoint, Endpoint);

pub(super) fn packet((source, destination): Ends, protocol: Protocol, flags: u8) -> Packet {
    Packet {
        family: if source.address.is_v4() {
            Family::V4
        } else {
            Family::V6
        },
        source: source.address,
        destination: destination.address,
        source_port: source.port,
        destination_port: destination.port,
        protocol,
        flags: TcpFlags::from_byte(flags),
        transport_offset: 20,
        is_fragment: false,
    }
}

/// The reason why a packet was refused, and true if it was dropped silently.
pub(super) type Refusal = (Reason, bool);

/// The indices of the link on which packets arrive, and of the one by which they leave.
pub(super) const ARRIVING: u32 = PacketLink::HOST + 1;
pub(super) const LEAVING: u32 = 2;

/// Sends a packet through tc ingress, and returns its ends afterwards.
pub(super) fn through_ingress(
    node: &Node,
    ends: Ends,
    protocol: Protocol,
    flags: u8,
) -> Result<Ends, Refusal> {
    node.run.borrow_mut().numbers = node.numbers_of_packets.get();
    let step = arrive(node, &packet(ends, protocol, flags), ARRIVING);
    let run = node.run.borrow();
    match step {
        Step::Next | Step::Pass => Ok(ends),
        Step::Translate | Step::Begin => Ok((ends.0.with_port(run.other_port), run.replacement)),
        Step::Refuse => Err((reason(&run), false)),
        Step::Defer => panic!("a packet arrives once more"),
        Step::Drop => Err((reason(&run), true)),
    }
}

pub(super) fn reason(run: &Run) -> Reason {
    Reason::from_index(run.reason).expect("a reason")
}

/// Sends a packet through tc egress, and returns its ends afterwards.
pub(super) fn through_egress(
    node: &Node,
    ends: Ends,
    protocol: Protocol,
    flags: u8,
) -> Result<Ends, Refusal> {
    node.run.borrow_mut().numbers = node.numbers_of_packets.get();
    let sent = packet(ends, protocol, flags);
    let step = leave(node, &sent, (LEAVING, node.returns.get()), || {
        node.is_free(&node.run.borrow())
    });
    let run = node.run.borrow();
    match step.unwrap_or(Step::Pass) {
        Step::Next | Step::Pass => Ok(ends),
        Step::Translate | Step::Begin => Ok((run.replacement, ends.1.with_port(run.other_port))),
        Step::Refuse => Err((reason(&run), false)),
        Step::Defer => panic!("a packet arrives once more"),
        Step::Drop => Err((reason(&run), true)),
    }
}
