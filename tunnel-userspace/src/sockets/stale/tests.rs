use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
};

use tunnel_common::{
    addr::{Address, Port},
    service::Membership,
};

use super::*;

const INDEX: u32 = 7;
const COOKIE: u64 = 99;

struct Maps {
    backends: BTreeMap<u32, Backend>,
    /// The service port that has the cluster IP.
    owner: Option<u32>,
    older: Option<(OverflowKey, Origin)>,
}

impl Maps {
    /// One backend, in this state.
    fn with(protocol: Protocol, state: State) -> Self {
        Self {
            backends: BTreeMap::from([(INDEX, backend(protocol, state))]),
            owner: Some(3),
            older: None,
        }
    }

    /// The same with IPv6 addresses.
    fn in_v6(&self) -> Self {
        let backend = |(index, backend): (&u32, &Backend)| {
            let address = in_v6(backend.address);
            (
                *index,
                Backend {
                    address,
                    ..*backend
                },
            )
        };
        let older = |(key, origin): &(OverflowKey, Origin)| {
            let address = in_v6(key.address);
            let key = OverflowKey::new(key.cookie, address, key.port, key.direction);
            (key, origin_in_v6(origin))
        };
        Self {
            backends: self.backends.iter().map(backend).collect(),
            owner: self.owner,
            older: self.older.as_ref().map(older),
        }
    }
}

/// An IPv4 address as the end of an IPv6 one.
fn in_v6(address: Address) -> Address {
    let IpAddr::V4(v4) = address.to_ip() else {
        return address;
    };
    let prefix = Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, 0).to_bits();
    Address::from_ip(Ipv6Addr::from_bits(prefix | u128::from(v4.to_bits())).into())
}

fn origin_in_v6(origin: &Origin) -> Origin {
    Origin {
        vip: in_v6(origin.vip),
        backend: in_v6(origin.backend),
        ..*origin
    }
}

impl Memory for Maps {
    fn sockets(&self, _: &mut dyn FnMut(Remembered) -> io::Result<()>) -> io::Result<()> {
        Ok(())
    }

    fn backend(&self, index: u32) -> io::Result<Option<Backend>> {
        Ok(self.backends.get(&index).copied())
    }

    fn backends(&self) -> io::Result<Vec<Backend>> {
        Ok(self.backends.values().copied().collect())
    }

    fn owner(&self, front: &FrontKey) -> io::Result<Option<u32>> {
        let own = address("10.96.0.10");
        let is_own = [own, in_v6(own)].contains(&front.address);
        let is_asked = is_own && front.port == Port::from_host(53);
        Ok(self.owner.filter(|_| is_asked))
    }

    fn older(&self, key: &OverflowKey) -> io::Result<Option<Origin>> {
        let older = self.older.filter(|(known, _)| known == key);
        Ok(older.map(|(_, origin)| origin))
    }
}

fn address(text: &str) -> Address {
    Address::from_ip(text.parse().expect("an address"))
}

fn first() -> State {
    State::default().next_use()
}

fn backend(protocol: Protocol, state: State) -> Backend {
    Backend {
        address: address("10.0.0.9"),
        port: Port::from_host(5353),
        protocol,
        flags: 0,
        service: 3,
        state,
        sets: Membership::NONE,
    }
}

fn origin(protocol: Protocol, state: State) -> Origin {
    let key = FrontKey::new(address("10.96.0.10"), Port::from_host(53), protocol);
    Origin {
        index: INDEX,
        state,
        service: 3,
        ..Origin::new(&key, address("10.0.0.9"), Port::from_host(5353))
    }
}

const ESTABLISHED: u32 = 1;
const CLOSED: u32 = 7;

/// Whether a socket that remembers that, and is connected there, is ended: the same in each family.
fn outlived(to: &str, origin: &Origin, maps: &Maps) -> bool {
    let v4 = outlived_in_family(address(to), origin, maps);
    let v6 = outlived_in_family(in_v6(address(to)), &origin_in_v6(origin), &maps.in_v6());
    assert_eq!(v4, v6, "IPv4 and IPv6");
    v4
}

fn outlived_in_family(to: Address, origin: &Origin, maps: &Maps) -> bool {
    let socket = Remembered {
        cookie: COOKIE,
        namespace: 1,
        state: ESTABLISHED,
        origin: *origin,
    };
    let place = Place::of(to, Port::from_host(5353), COOKIE);
    let protocols = [Protocol::UDP, Protocol::TCP];
    let search = Search::new(&protocols, maps);
    let mut sieve = Sieve::new(&search);
    let is_suspect = sieve.holds(&socket).expect("readable");
    let has_gone = search.has_gone(&place, origin).expect("readable");
    // The sieve may hold more, but never less.
    assert!(is_suspect || !has_gone);
    is_suspect && has_gone
}

#[test]
fn a_socket_stays_while_its_backend_serves_and_goes_with_it() {
    let origin = origin(Protocol::UDP, first());
    let now = |state| outlived("10.0.0.9", &origin, &Maps::with(Protocol::UDP, state));

    assert!(!now(first()));
    assert!(now(first().gone()));
}

#[test]
fn where_an_index_is_in_another_use_what_the_cluster_ip_leads_to_now_counts() {
    let mut maps = Maps::with(Protocol::UDP, first().next_use());
    let elsewhere = Backend {
        address: address("10.0.0.8"),
        ..backend(Protocol::UDP, first().next_use())
    };
    for protocol in [Protocol::UDP, Protocol::TCP] {
        let origin = origin(protocol, first());
        let now = |maps: &Maps| outlived("10.0.0.9", &origin, maps);
        maps.backends.insert(INDEX, elsewhere);
        maps.backends.remove(&1);
        assert!(now(&maps));

        // The same place serves by another index: it came back, or the map is a new one.
        maps.backends.insert(1, backend(protocol, first()));
        assert!(!now(&maps));
        maps.backends.remove(&INDEX);
        assert!(!now(&maps));

        maps.backends.insert(1, backend(protocol, first().gone()));
        assert!(now(&maps));
        maps.backends.insert(1, backend(protocol, first()));
        for owner in [Some(4), None] {
            maps.owner = owner;
            assert!(now(&maps));
        }
        maps.owner = Some(3);
    }
}

#[test]
fn a_socket_stays_where_its_address_went_to_another_port_with_the_same_endpoint() {
    let origin = origin(Protocol::UDP, first());
    let mut maps = Maps::with(Protocol::UDP, first().gone());
    maps.owner = Some(4);
    assert!(outlived("10.0.0.9", &origin, &maps));

    let taken_over = Backend {
        service: 4,
        ..backend(Protocol::UDP, first())
    };
    maps.backends.insert(INDEX + 1, taken_over);

    assert!(!outlived("10.0.0.9", &origin, &maps));
}

#[test]
fn a_choice_that_was_made_while_the_backend_went_has_outlived_it() {
    let origin = origin(Protocol::UDP, first().gone());
    let maps = Maps::with(Protocol::UDP, first().gone());

    assert!(outlived("10.0.0.9", &origin, &maps));
}

#[test]
fn a_socket_that_is_connected_elsewhere_is_left_alone() {
    let maps = Maps::with(Protocol::UDP, first().gone());
    let origin = origin(Protocol::UDP, first());

    assert!(!outlived("10.0.0.8", &origin, &maps));
}

#[test]
fn a_socket_that_asked_another_cluster_ip_since_it_connected_goes_with_its_own_backend() {
    let mut maps = Maps::with(Protocol::UDP, first().gone());
    let mut other = origin(Protocol::UDP, first());
    other.backend = address("10.0.0.8");
    other.index = 8;
    other.flags = Origin::OVERFLOWED;
    let now = |maps: &Maps| outlived("10.0.0.9", &other, maps);
    assert!(!now(&maps));

    let key = OverflowKey::new(
        COOKIE,
        address("10.0.0.9"),
        Port::from_host(5353),
        Direction::REVERSE,
    );
    maps.older = Some((key, origin(Protocol::UDP, first())));

    assert!(now(&maps));
    maps.backends.insert(INDEX, backend(Protocol::UDP, first()));
    assert!(!now(&maps));
}

#[test]
fn a_connect_that_was_refused_or_sent_to_the_tunnel_has_no_backend_to_outlive() {
    let maps = Maps::with(Protocol::UDP, first().gone());
    let refused = origin(Protocol::UDP, State::default());
    assert!(!outlived("10.0.0.9", &refused, &maps));

    let maps = Maps::with(Protocol::TCP, first().gone());
    let mut steered = origin(Protocol::TCP, State::default());
    steered.index = Origin::NOBODY;
    assert!(!outlived("10.0.0.9", &steered, &maps));
}

#[test]
fn a_connection_over_tcp_goes_when_its_index_leads_elsewhere() {
    let origin = origin(Protocol::TCP, State::default());
    let now = |backend| {
        let mut maps = Maps::with(Protocol::TCP, first());
        maps.backends.insert(INDEX, backend);
        outlived("10.0.0.9", &origin, &maps)
    };
    let serving = backend(Protocol::TCP, first());

    assert!(!now(serving));
    assert!(now(backend(Protocol::TCP, first().gone())));
    // The same endpoint came back, and got the same index.
    assert!(!now(backend(Protocol::TCP, first().next_use())));
    assert!(now(Backend {
        address: address("10.0.0.8"),
        ..serving
    }));
    assert!(now(Backend {
        service: 4,
        ..serving
    }));
}

#[test]
fn sockets_that_are_not_connected_or_of_another_protocol_are_not_looked_at() {
    let maps = Maps::with(Protocol::UDP, first().gone());
    let holds = |state, protocols: &[Protocol]| {
        let socket = Remembered {
            cookie: COOKIE,
            namespace: 1,
            state,
            origin: origin(Protocol::UDP, first()),
        };
        let search = Search::new(protocols, &maps);
        let mut sieve = Sieve::new(&search);
        sieve.holds(&socket).expect("readable")
    };

    assert!(holds(ESTABLISHED, &[Protocol::UDP]));
    assert!(!holds(CLOSED, &[Protocol::UDP]));
    assert!(!holds(ESTABLISHED, &[Protocol::TCP]));
}
