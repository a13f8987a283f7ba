use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
};

use tunnel_common::service::Membership;

use super::*;

const UDP: Protocol = Protocol::UDP;
const TCP: Protocol = Protocol::TCP;
const INDEX: u32 = 7;
const PORT: Port = Port::from_host(5353);
const COOKIE: u64 = 99;
const ESTABLISHED: u32 = 1;
const CLOSED: u32 = 7;

/// For each address family: the cluster IP, its backend's address, and another address.
const ADDRESSES: [[&str; 3]; 2] = [
    ["10.96.0.10", "10.0.0.9", "10.0.0.8"],
    ["fd00:96::10", "fd00::9", "fd00::8"],
];

/// A socket that is connected to a cluster IP's backend, along with the contents of the maps.
struct Case {
    to: Address,
    elsewhere: Address,
    origin: Origin,
    backends: BTreeMap<u32, Backend>,
    front: FrontendKey,
    /// The id of the service port that owns the frontend.
    owner: Option<u32>,
    /// The first older translation, and the entry in the map of layout 7.
    older: Option<Origin>,
    /// A mixture of translations, which the first reader of the older translations gets.
    mixture: Option<Origin>,
    is_mixture_read: AtomicBool,
    overflow: Option<(OverflowKey, Origin)>,
}

impl Case {
    /// Creates a case in which the socket's backend is serving.
    fn new(protocol: Protocol, addresses: [&str; 3]) -> Self {
        let [vip, to, elsewhere] =
            addresses.map(|text| Address::from_ip(text.parse().expect("an address")));
        let front = FrontendKey::new(vip, Port::from_host(53), protocol);
        let origin = Origin {
            index: INDEX,
            // Only UDP sockets store the backend's state.
            state: (protocol == UDP).then(first).unwrap_or_default(),
            service: 3,
            flags: Origin::CONNECTED,
            ..Origin::new(&front, to, PORT)
        };
        let mut case = Self {
            to,
            elsewhere,
            origin,
            backends: BTreeMap::new(),
            front,
            owner: Some(3),
            older: None,
            mixture: None,
            is_mixture_read: AtomicBool::new(false),
            overflow: None,
        };
        case.put(INDEX, 3);
        case
    }

    /// Adds a serving backend with the address that the socket is connected to.
    fn put(&mut self, index: u32, service: u32) {
        let backend = Backend {
            address: self.to,
            port: PORT,
            protocol: self.front.protocol,
            flags: 0,
            service,
            state: first(),
            sets: Membership::NONE,
        };
        self.backends.insert(index, backend);
    }

    fn backend_at(&mut self, index: u32) -> &mut Backend {
        self.backends.get_mut(&index).expect("a backend")
    }

    fn socket(&self, state: u32) -> TranslatedSocket {
        TranslatedSocket {
            cookie: COOKIE,
            namespace: 1,
            state,
            origin: self.origin,
        }
    }

    fn is_stale(&self) -> bool {
        let search = StaleSearch::new(&[UDP, TCP], self);
        let mut filter = SuspectFilter::new(&search);
        let is_suspect = filter
            .may_be_stale(&self.socket(ESTABLISHED))
            .expect("readable");
        let socket = ListedSocket::of(self.to, PORT, COOKIE);
        let is_stale = search.is_stale(&socket, &self.origin).expect("readable");
        // The first filter may select too many sockets, but never too few.
        assert!(is_suspect || !is_stale);
        is_suspect && is_stale
    }
}

impl TranslationMaps for Case {
    fn sockets(&self, _: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>) -> io::Result<()> {
        Ok(())
    }

    fn backend(&self, index: u32) -> io::Result<Option<Backend>> {
        Ok(self.backends.get(&index).copied())
    }

    fn backends(&self) -> io::Result<Vec<Backend>> {
        Ok(self.backends.values().copied().collect())
    }

    fn owner(&self, front: &FrontendKey) -> io::Result<Option<u32>> {
        Ok(self.owner.filter(|_| *front == self.front))
    }

    fn older_translations(
        &self,
        visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
    ) -> io::Result<()> {
        let is_first = !self.is_mixture_read.swap(true, Ordering::Relaxed);
        let older = self.mixture.filter(|_| is_first).or(self.older);
        older.map_or(Ok(()), |origin| {
            let state = ESTABLISHED;
            visit(TranslatedSocket {
                origin,
                ..self.socket(state)
            })
        })
    }

    fn overflow(&self, key: &OverflowKey) -> io::Result<Option<Origin>> {
        let older = self.overflow.filter(|(known, _)| known == key);
        Ok(older.map(|(_, origin)| origin))
    }
}

fn first() -> BackendState {
    BackendState::default().next_generation()
}

/// Applies a change and returns, for each address family, true if the socket is stale afterwards.
fn stale_by_family(protocol: Protocol, change: impl Fn(&mut Case)) -> [bool; 2] {
    ADDRESSES.map(|addresses| {
        let mut case = Case::new(protocol, addresses);
        change(&mut case);
        case.is_stale()
    })
}

fn assert_stale(what: &str, protocol: Protocol, change: impl Fn(&mut Case)) {
    assert_eq!(
        stale_by_family(protocol, change),
        [true; 2],
        "{protocol:?} {what}"
    );
}

fn assert_not_stale(what: &str, protocol: Protocol, change: impl Fn(&mut Case)) {
    assert_eq!(
        stale_by_family(protocol, change),
        [false; 2],
        "{protocol:?} {what}"
    );
}

/// Removes the backend without reusing its index.
fn remove_backend(case: &mut Case) {
    case.backend_at(INDEX).state = first().removed();
}

/// Replaces the backend with one that has a different address but the same index.
fn reuse_index(case: &mut Case) {
    case.backend_at(INDEX).address = case.elsewhere;
    case.backend_at(INDEX).state = first().next_generation();
}

#[test]
fn a_socket_stays_while_its_backend_serves_and_goes_with_it() {
    assert_not_stale("its backend serves", UDP, |_| {});
    assert_stale("its backend has gone", UDP, remove_backend);
    assert_stale("it was chosen while it went", UDP, |case| {
        remove_backend(case);
        case.origin.state = first().removed();
    });
    assert_not_stale("it is connected elsewhere", UDP, |case| {
        remove_backend(case);
        case.to = case.elsewhere;
    });
}

#[test]
fn with_a_reused_index_the_current_backends_of_the_cluster_ip_decide() {
    for protocol in [UDP, TCP] {
        assert_stale("nothing serves at its address", protocol, reuse_index);
        assert_not_stale("its address serves at another index", protocol, |case| {
            reuse_index(case);
            case.put(1, 3);
        });
        let renumber = |case: &mut Case| {
            case.backends.clear();
            case.put(1, 3);
        };
        assert_not_stale("the map is a new one", protocol, renumber);
        assert_stale(
            "its address was removed at another index",
            protocol,
            |case| {
                renumber(case);
                case.backend_at(1).state = first().removed();
            },
        );
        for owner in [Some(4), None] {
            assert_stale("the cluster IP is another's", protocol, |case| {
                renumber(case);
                case.owner = owner;
            });
        }
    }
}

#[test]
fn a_socket_stays_where_its_address_went_to_another_port_with_the_same_endpoint() {
    assert_stale("the other has no endpoint", UDP, |case| {
        remove_backend(case);
        case.owner = Some(4);
    });
    assert_not_stale("the other has the same endpoint", UDP, |case| {
        remove_backend(case);
        case.owner = Some(4);
        case.put(INDEX + 1, 4);
    });
}

#[test]
fn a_socket_that_sent_to_another_cluster_ip_goes_with_the_backend_it_is_connected_to() {
    let send_to_another = |case: &mut Case, flags: u16| {
        let key = OverflowKey::new(COOKIE, case.to, PORT, Direction::REVERSE);
        if flags == Origin::HAS_OLDER {
            case.older = Some(case.origin);
        } else {
            case.overflow = Some((key, case.origin));
        }
        case.origin.backend = case.elsewhere;
        case.origin.index = INDEX + 1;
        case.origin.flags = flags;
    };
    for flags in [Origin::HAS_OLDER, Origin::OVERFLOWED] {
        assert_not_stale("its own backend serves", UDP, |case| {
            send_to_another(case, flags);
        });
        assert_stale("its own backend has gone", UDP, |case| {
            send_to_another(case, flags);
            remove_backend(case);
        });
        assert_not_stale("its own backend is not known", UDP, |case| {
            send_to_another(case, flags);
            remove_backend(case);
            case.older = None;
            case.overflow = None;
        });
        assert_not_stale("its first older translation leads elsewhere", UDP, |case| {
            send_to_another(case, flags);
            remove_backend(case);
            let elsewhere = case.elsewhere;
            for older in case
                .older
                .iter_mut()
                .chain(case.overflow.iter_mut().map(|(_, it)| it))
            {
                older.backend = elsewhere;
            }
        });
    }
}

#[test]
fn a_socket_that_connected_to_the_backend_itself_stays_although_it_sends_to_the_cluster_ip() {
    assert_not_stale("the translation comes from a datagram", UDP, |case| {
        remove_backend(case);
        case.origin.flags = 0;
    });
    assert_not_stale("an older one, too", UDP, |case| {
        remove_backend(case);
        case.origin.flags = 0;
        case.older = Some(case.origin);
        case.origin.flags = Origin::HAS_OLDER;
    });
    assert_stale("the older one comes from connect()", UDP, |case| {
        remove_backend(case);
        case.older = Some(case.origin);
        case.origin.flags = Origin::HAS_OLDER;
    });
    assert_stale(
        "a program stored it that did not distinguish",
        UDP,
        |case| {
            remove_backend(case);
            case.origin.flags = 0;
            case.origin.version = 2;
        },
    );
}

#[test]
fn a_mixture_of_two_older_translations_ends_no_socket() {
    /// Stores an older translation to another backend, which is removed, and returns the mixture of this
    /// translation and the one to the socket's backend.
    fn mix(case: &mut Case) -> Origin {
        case.put(INDEX + 1, 3);
        let elsewhere = case.elsewhere;
        let removed = case.backend_at(INDEX + 1);
        (removed.address, removed.state) = (elsewhere, first().removed());
        case.older = Some(case.origin);
        case.origin.flags = Origin::HAS_OLDER;
        case.origin.backend = elsewhere;
        Origin {
            index: INDEX + 1,
            ..case.older.expect("it was stored")
        }
    }
    assert_not_stale("a program has not finished yet", UDP, |case| {
        case.older = Some(mix(case));
    });
    assert_not_stale("the VIP is another's", UDP, |case| {
        let mut mixture = mix(case);
        mixture.vip = case.elsewhere;
        case.mixture = Some(mixture);
    });
}

#[test]
fn a_connect_that_was_refused_or_sent_to_the_tunnel_has_no_backend_to_outlive() {
    assert_not_stale("it was refused", UDP, |case| {
        remove_backend(case);
        case.origin.state = BackendState::default();
    });
    assert_not_stale("it was sent to the tunnel", TCP, |case| {
        remove_backend(case);
        case.origin.index = Origin::NO_BACKEND;
    });
}

#[test]
fn a_connection_over_tcp_goes_when_its_index_leads_elsewhere() {
    assert_not_stale("its backend serves", TCP, |_| {});
    assert_stale("its backend has gone", TCP, remove_backend);
    assert_not_stale("its endpoint came back with the same index", TCP, |case| {
        case.backend_at(INDEX).state = first().next_generation();
    });
    assert_stale("its index leads elsewhere", TCP, |case| {
        case.backend_at(INDEX).address = case.elsewhere;
    });
    assert_stale("its index is another port's", TCP, |case| {
        case.backend_at(INDEX).service = 4;
    });
}

#[test]
fn sockets_that_are_not_connected_or_of_another_protocol_are_skipped() {
    let mut case = Case::new(UDP, ADDRESSES[0]);
    remove_backend(&mut case);
    let is_suspect = |state, protocols: &[Protocol]| {
        let search = StaleSearch::new(protocols, &case);
        let result = SuspectFilter::new(&search).may_be_stale(&case.socket(state));
        result.expect("readable")
    };

    assert!(is_suspect(ESTABLISHED, &[UDP]));
    assert!(!is_suspect(CLOSED, &[UDP]));
    assert!(!is_suspect(ESTABLISHED, &[TCP]));
}
