use core::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use super::*;
use crate::{
    addr::Protocol,
    affinity::{Affinity, AffinityKey},
    origin::UDP_IDLE_NS,
    service::{IndexRange, InlineBackend, MAX_INLINE_BACKENDS, Membership, Slot, SourceRange},
};

const SECOND: u64 = 1_000_000_000;

/// Maps with one frontend, at index 5.
struct TestMaps {
    frontend: Frontend,
    /// The index that is returned for every key.
    index: Option<u32>,
    slots: Vec<Slot>,
    sources: Vec<SourceRange>,
    backends: Vec<Backend>,
    open: Vec<u64>,
    random: Cell<u32>,
    turn: Cell<u32>,
    now: Cell<u64>,
    affinity: RefCell<BTreeMap<u32, &'static Affinity>>,
    /// An entry that a concurrent connect() stores first.
    concurrent: Option<&'static Affinity>,
}

impl Maps for TestMaps {
    fn frontend_index(&self, _: &FrontendKey) -> Option<u32> {
        self.index
    }

    fn frontend(&self, index: u32) -> Option<&Frontend> {
        (index == 5).then_some(&self.frontend)
    }

    fn slot(&self, index: u32) -> Option<&Slot> {
        self.slots.get(index as usize)
    }

    fn source_range(&self, index: u32) -> Option<&SourceRange> {
        self.sources.get(index as usize)
    }

    fn backend(&self, index: u32) -> Option<&Backend> {
        self.backends.get(index as usize)
    }

    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity> {
        self.affinity.borrow().get(&key.service).copied()
    }

    fn insert_affinity(&self, entry: &Affinity, is_new: bool) -> bool {
        let mut stored = self.affinity.borrow_mut();
        if let Some(concurrent) = self.concurrent {
            stored.insert(entry.key.service, concurrent);
        }
        if is_new && stored.contains_key(&entry.key.service) {
            return false;
        }
        stored.insert(entry.key.service, Box::leak(Box::new(*entry)));
        true
    }

    fn open_connections(&self, backend: u32) -> u64 {
        self.open.get(backend as usize).copied().unwrap_or(0)
    }

    fn next_round_robin(&self, _: u32) -> Option<u32> {
        Some(self.turn.replace(self.turn.get() + 1))
    }

    fn random(&self) -> u32 {
        self.random.get()
    }

    fn now(&self) -> u64 {
        self.now.get()
    }
}

/// A client, whose address may be unknown. It may be bound to an address, and may be on the host.
struct Client {
    address: Option<[u8; 4]>,
    is_bound: bool,
    is_host: bool,
}

const POD: Client = client(Some([10, 1, 0, 1]), false, false);
const HOST: Client = client(None, false, true);

const fn client(address: Option<[u8; 4]>, is_bound: bool, is_host: bool) -> Client {
    Client {
        address,
        is_bound,
        is_host,
    }
}

impl ClientContext for Client {
    fn client(&self, _: bool) -> Identity {
        use crate::affinity::Client;
        Identity {
            client: ClientScalars::new(&match self.address {
                Some(ip) => Client::of_address(Address::from_ip(ip.into())),
                None => Client::of_namespace(7),
            }),
            is_by_source: self.is_bound,
        }
    }

    fn is_bound_to_loopback(&self, _: bool) -> bool {
        false
    }

    fn is_known_host(&self) -> bool {
        self.is_host
    }
}

fn key() -> FrontendKey {
    key_of([10, 96, 0, 10])
}

fn key_of(ip: [u8; 4]) -> FrontendKey {
    FrontendKey::new(
        Address::from_ip(ip.into()),
        Port::from_host(80),
        Protocol::TCP,
    )
}

/// Returns a frontend record without backends.
pub(crate) const fn record(key: FrontendKey) -> Frontend {
    const NOTHING: IndexRange = IndexRange { base: 0, len: 0 };
    Frontend {
        key,
        service: 3,
        cluster: NOTHING,
        algorithm: Algorithm::RANDOM,
        flags: Frontend::HAS_ENDPOINTS,
        packet_flags: 0,
        reserved: 0,
        inline_backends: [InlineBackend::NONE; MAX_INLINE_BACKENDS],
        local: NOTHING,
        affinity_timeout: 0,
        source_ranges: NOTHING,
    }
}

/// Returns maps with one frontend. All of its backends are in `cluster`, and the last one is also in `local`.
fn memory(backends: u8) -> TestMaps {
    let serving = BackendState::default().next_generation();
    let len = u32::from(backends);
    let backend = |number: u8| Backend {
        address: Address::from_ip([10, 1, 0, number].into()),
        port: Port::from_host(8080),
        protocol: Protocol::TCP,
        flags: 0,
        service: 3,
        state: serving,
        sets: Membership::CLUSTER,
    };
    let mut all: Vec<_> = (0..backends).map(backend).collect();
    let mut frontend = record(key());
    frontend.cluster = IndexRange { base: 0, len };
    if let Some(last) = all.last_mut() {
        last.sets = Membership::CLUSTER.union(Membership::LOCAL);
        frontend.local = IndexRange { base: len, len: 1 };
    }
    if all.len() <= MAX_INLINE_BACKENDS {
        for (entry, (index, backend)) in frontend.inline_backends.iter_mut().zip((0..).zip(&all)) {
            *entry = InlineBackend {
                address: backend.address,
                port: backend.port,
                share: 1,
                index,
            };
        }
    }
    let slot = |backend| Slot { backend, share: 1 };
    TestMaps {
        frontend,
        index: Some(5),
        slots: (0..len).chain(len.checked_sub(1)).map(slot).collect(),
        sources: Vec::new(),
        backends: all,
        open: Vec::new(),
        random: Cell::new(0),
        turn: Cell::new(0),
        now: Cell::new(100 * SECOND),
        affinity: RefCell::default(),
        concurrent: None,
    }
}

/// Chooses a backend for a client; returns the backend's index and the reason.
fn chosen(memory: &TestMaps, client: &Client, traffic: Traffic) -> Result<(u32, Reason), NoChoice> {
    let record = FrontendRecord {
        index: 5,
        frontend: &memory.frontend,
    };
    let choice = choose_backend(memory, client, &memory.frontend.key, record, traffic)?;
    let at = &memory.backends[choice.index as usize];
    assert_eq!((choice.address, choice.port), (at.address, at.port));
    Ok((choice.index, choice.reason))
}

fn chosen_index(memory: &TestMaps) -> Result<u32, NoChoice> {
    chosen_index_for(memory, &POD)
}

fn chosen_index_for(memory: &TestMaps, client: &Client) -> Result<u32, NoChoice> {
    chosen(memory, client, Traffic::Sockets).map(|(index, _)| index)
}

fn has_frontend(memory: &TestMaps, client: &Client, key: &FrontendKey, traffic: Traffic) -> bool {
    matches!(
        find_frontend(memory, client, key, traffic),
        Lookup::Found(_)
    )
}

#[test]
fn a_record_of_another_key_is_never_taken() {
    fn find(memory: &TestMaps, key: FrontendKey) -> Lookup<FrontendRecord<'_>> {
        find_frontend(memory, &POD, &key, Traffic::Sockets)
    }
    let mut memory = memory(1);

    assert!(matches!(find(&memory, key()), Lookup::Found(_)));
    let other = find(&memory, key_of([10, 96, 0, 11]));
    assert_eq!(other, Lookup::Unstable);
    memory.index = Some(6);
    assert_eq!(find(&memory, key()), Lookup::Unstable);
    memory.index = None;
    assert_eq!(find(&memory, key()), Lookup::None);
}

#[test]
fn a_frontend_for_packets_ignores_sockets_and_one_at_loopback_serves_the_host_only() {
    let mut memory = memory(1);
    memory.frontend.flags |= Frontend::NOT_SOCKETS;
    assert!(!has_frontend(&memory, &POD, &key(), Traffic::Sockets));
    assert!(has_frontend(&memory, &POD, &key(), Traffic::Packets));

    let loopback = key_of([127, 0, 0, 1]);
    (memory.frontend.key, memory.frontend.flags) = (loopback, Frontend::HAS_ENDPOINTS);
    assert!(has_frontend(&memory, &HOST, &loopback, Traffic::Sockets));
    assert!(!has_frontend(&memory, &POD, &loopback, Traffic::Sockets));
}

#[test]
fn sets_small_and_large_lead_to_each_of_their_backends() {
    for len in [1, 3, 4, 9] {
        let memory = memory(len);
        let chosen = |number| {
            memory.random.set(number);
            chosen_index(&memory)
        };
        let all: Vec<_> = (0..u32::from(len)).map(Ok).collect();
        assert_eq!((0..u32::from(len)).map(chosen).collect::<Vec<_>>(), all);
    }
}

#[test]
fn each_kind_of_traffic_has_its_set() {
    let mut memory = memory(3);
    memory.frontend.flags |= Frontend::PACKETS_LOCAL;

    assert_eq!(chosen_index(&memory), Ok(0));
    // Packets don't get the first inline backend, because the inline backends are the set for sockets.
    assert_eq!(
        chosen(&memory, &POD, Traffic::Packets),
        Ok((2, Reason::Translated))
    );
}

#[test]
fn no_backend_refuses_and_none_on_this_node_drops() {
    let mut memory = memory(0);
    let none = chosen_index(&memory).expect_err("no backend");
    assert_eq!(none, NoChoice::NoLocalBackend);
    assert!(none.is_drop());

    memory.frontend.flags = 0;
    let none = chosen_index(&memory).expect_err("no backend");
    assert_eq!(none, NoChoice::NoBackend);
    assert!(!none.is_drop());
}

#[test]
fn slots_and_backends_out_of_range_are_no_choice() {
    let mut memory = memory(4);
    memory.backends.truncate(3);
    memory.random.set(3);
    assert_eq!(chosen_index(&memory), Err(NoChoice::InvalidRecord));

    memory.slots.clear();
    memory.random.set(0);
    assert_eq!(chosen_index(&memory), Err(NoChoice::InvalidRecord));
}

#[test]
fn only_clients_in_the_source_ranges_may_use_a_frontend_that_has_some() {
    let mut memory = memory(1);
    let address = |ip: [u8; 4]| Address::from_ip(ip.into());
    memory.sources = vec![SourceRange {
        first: address([10, 1, 0, 0]),
        last: address([10, 1, 0, 255]),
    }];
    memory.frontend.source_ranges = IndexRange { base: 0, len: 1 };

    assert_eq!(chosen_index_for(&memory, &POD), Ok(0));
    let other = client(Some([10, 2, 0, 1]), false, false);
    assert_eq!(
        chosen_index_for(&memory, &other),
        Err(NoChoice::ClientDenied)
    );
    let unknown = client(None, false, false);
    assert_eq!(
        chosen_index_for(&memory, &unknown),
        Err(NoChoice::ClientUnknown)
    );

    // The planner decides for the host's sockets, unless they are bound or the host's address is unknown.
    assert_eq!(
        chosen_index_for(&memory, &HOST),
        Err(NoChoice::ClientDenied)
    );
    memory.frontend.flags |= Frontend::ADMITS_HOST;
    assert_eq!(chosen_index_for(&memory, &HOST), Ok(0));
    let bound = client(Some([10, 2, 0, 1]), true, true);
    assert_eq!(
        chosen_index_for(&memory, &bound),
        Err(NoChoice::ClientDenied)
    );
    memory.frontend.flags |= Frontend::HOST_UNKNOWN;
    assert_eq!(
        chosen_index_for(&memory, &HOST),
        Err(NoChoice::ClientUnknown)
    );
}

#[test]
fn each_algorithm_chooses_as_defined() {
    for len in [3, 5] {
        let mut memory = memory(len);
        memory.frontend.algorithm = Algorithm::ROUND_ROBIN;
        let turns: Vec<_> = (0..=u32::from(len))
            .map(|_| chosen_index(&memory))
            .collect();
        let wanted = (0..=u32::from(len)).map(|turn| Ok(turn % u32::from(len)));
        assert_eq!(turns, wanted.collect::<Vec<_>>());

        memory.frontend.algorithm = Algorithm::SOURCE_HASH;
        let by_client: Vec<_> = (0..32)
            .map(|last| {
                let client = client(Some([10, 1, 1, last]), false, false);
                let first = chosen(&memory, &client, Traffic::Sockets);
                assert_eq!(first, chosen(&memory, &client, Traffic::Sockets));
                first.expect("a backend").0
            })
            .collect();
        assert!((0..u32::from(len)).all(|index| by_client.contains(&index)));

        memory.frontend.algorithm = Algorithm::DESTINATION_HASH;
        assert_eq!(chosen_index(&memory), chosen_index_for(&memory, &HOST));

        // The random numbers select offsets 0 and 1.
        memory.frontend.algorithm = Algorithm::LEAST_CONN;
        memory.open = vec![2, 1];
        assert_eq!(chosen_index(&memory), Ok(1));
        memory.open = vec![1, 1];
        assert_eq!(chosen_index(&memory), Ok(0));
    }
}

#[test]
fn a_client_keeps_its_backend_while_it_serves_and_the_time_lasts() {
    let mut memory = memory(3);
    memory.frontend.affinity_timeout = 10;
    let connect = |memory: &TestMaps, number, seconds| {
        memory.random.set(number);
        memory.now.set(seconds * SECOND);
        chosen(memory, &POD, Traffic::Sockets).expect("a backend")
    };

    assert_eq!(connect(&memory, 1, 100), (1, Reason::Translated));
    assert_eq!(connect(&memory, 2, 109), (1, Reason::TranslatedAffinity));
    assert_eq!(connect(&memory, 2, 118), (1, Reason::TranslatedAffinity));
    assert_eq!(connect(&memory, 2, 128), (2, Reason::Translated));

    memory.backends[2].state = memory.backends[2].state.removed();
    assert_eq!(connect(&memory, 0, 129), (0, Reason::Translated));
    // The index was reassigned to another service port.
    memory.backends[0].service = 4;
    assert_eq!(connect(&memory, 1, 130), (1, Reason::Translated));
}

#[test]
fn the_second_of_two_concurrent_connects_uses_the_entry_of_the_first() {
    let mut memory = memory(3);
    memory.frontend.affinity_timeout = 10;
    memory.random.set(1);
    let stored = |index, state| -> &'static Affinity {
        Box::leak(Box::new(Affinity {
            last_used: 100 * SECOND,
            index,
            state,
            key: AffinityKey {
                client: POD.client(true).client.client(),
                service: 3,
            },
        }))
    };
    let serving = memory.backends[2].state;
    memory.concurrent = Some(stored(2, serving));
    let chosen_now = |memory: &TestMaps| chosen(memory, &POD, Traffic::Sockets);
    assert_eq!(chosen_now(&memory), Ok((2, Reason::TranslatedAffinity)));

    memory.affinity.borrow_mut().clear();
    memory.concurrent = Some(stored(2, serving.removed()));
    assert_eq!(chosen_now(&memory), Ok((1, Reason::Translated)));
}

#[test]
fn a_flow_keeps_a_backend_that_serves_its_service_port() {
    let mut memory = memory(2);
    let backend = memory.backends[1];
    let flow = Origin {
        index: 1,
        state: backend.state,
        service: 3,
        protocol: Protocol::UDP,
        ..Origin::new(&key(), backend.address, backend.port)
    };
    let is_kept = |memory: &TestMaps, flow: &Origin, now| {
        flow_backend(memory, &memory.frontend, flow, now).is_some()
    };

    assert!(is_kept(&memory, &flow, 1));
    assert!(!is_kept(&memory, &flow, UDP_IDLE_NS));
    assert!(!is_kept(&memory, &Origin { index: 9, ..flow }, 1));
    memory.backends[1].service = 4;
    assert!(
        !is_kept(&memory, &flow, 1),
        "the index belongs to another service port"
    );
    memory.backends[1].service = 3;
    memory.backends[1].state = flow.state.removed();
    assert!(!is_kept(&memory, &flow, 1));
    assert_eq!(state(&memory, 1), flow.state.removed());
    assert_eq!(state(&memory, 9), BackendState::default());
}
