//! UDP sockets that send to several Services, next to a process that uses thousands of addresses on many
//! sockets.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use nix::errno::Errno;
use socket2::{Domain, Type};
use tunnel_common::{
    origin::{Direction, OverflowKey},
    table::{MapSizes, OLDER_SHARED},
};
use tunnel_tests::{
    feature::{self, Feature},
    load_scale::LoadScale,
    manifest::{Protocol, Service},
    sandbox::Sandbox,
    test_name, wait,
};

use crate::{
    fixture::Scene,
    support::{
        CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, Vip, count_during, ensure_eq, errno,
        maps_directory, receive, until_backends,
    },
};

/// The victim's name servers: VIPs, each with a backend of its own.
const RESOLVERS: [(Vip, &str); 3] = [
    (Vip::of(10), "one"),
    (Vip::of(11), "two"),
    (Vip::of(12), "three"),
];
/// The VIP of a Service with many ports, all of which have the same three backends.
const PEERS: Vip = Vip::of(20);
/// The VIPs of the Services to which the attacker sends.
const FLOODED: [Vip; 4] = [Vip::of(30), Vip::of(31), Vip::of(32), Vip::of(33)];
const FIRST_PORT: u16 = 2000;
/// The number of ports of each Service to which the attacker sends. Together, these are more addresses than
/// a socket may have translations of.
const FLOODED_PORTS: u16 = 200;
const PEER_PORTS: u16 = 300;
/// The number of translations that a socket can have in its own storage.
const OWN_TRANSLATIONS: u16 = 119;
/// The number of translations in the map that all sockets share: as many as a single socket may have there.
const SHARED: u32 = 512;
/// The number of sockets that each of the attacker's threads keeps open.
const OPEN: usize = 8;
/// The minimum number of datagrams that the attacker sends before and while the victim asks.
const MIN_FLOOD: u32 = 20_000;

/// The number of datagrams that the attacker sends before a name server's answer is read.
const SLOW_ANSWER: u32 = 6000;

/// The number of answers that the victim waits for, in all.
const ANSWERS: u32 = 1000;

/// Builds a Service with UDP ports from [`FIRST_PORT`] on.
fn with_ports(name: &str, vip: Vip, ports: u16) -> Service {
    let ports = FIRST_PORT..FIRST_PORT + ports;
    ports.fold(Service::new(name, vip.ips()), |service, port| {
        service.port(Protocol::UDP, port, DNS_TARGET)
    })
}

fn start() -> Result<Scene> {
    let scene = Scene::with(&["one", "two", "three"], |settings| {
        settings.maps = MapSizes {
            frontends: 4096,
            slots: 8192,
            backends: 8192,
            shared_translations: SHARED,
            ..settings.maps
        };
        // All Services are in one namespace.
        settings.namespace_share = 100;
    })?;
    scene.node.start()?;
    for (number, (vip, name)) in RESOLVERS.into_iter().enumerate() {
        let service = Service::new(&format!("dns-{number}"), vip.ips())
            .port(Protocol::UDP, DNS, DNS_TARGET)
            .backends(scene.addresses(&[name])?);
        scene.node.apply(service)?;
    }
    scene
        .node
        .apply(with_ports("peers", PEERS, PEER_PORTS).backends(scene.all_addresses()))?;
    until_backends(&scene.node, "dns-2", 1)?;
    until_backends(&scene.node, "peers", 3)?;
    Ok(scene)
}

/// Returns the number of translations in the map that all sockets share.
fn shared_translations(scene: &Scene) -> Result<usize> {
    let pin = scene
        .node
        .bpffs()
        .join(maps_directory(""))
        .join(OLDER_SHARED.name);
    let map = HashMap::<_, [u8; 32], [u8; 128]>::try_from(Map::HashMap(MapData::from_pin(pin)?))?;
    let keys: Result<Vec<_>, _> = map.keys().collect();
    // Each translation has an entry under its VIP and another one under its backend.
    let keys = keys?
        .into_iter()
        .map(|key| -> OverflowKey { zerocopy::transmute!(key) });
    Ok(keys
        .filter(|key| key.direction == Direction::FORWARD)
        .count())
}

/// Sends a datagram and waits for the answer to it. If the datagram or its answer is lost, as may happen under
/// load, sends it again.
fn ask(socket: &UdpSocket, to: SocketAddr) -> Result<(String, SocketAddr)> {
    for _ in 0..20 {
        socket.send_to(b"who?", to)?;
        let answer = receive(socket);
        if !is_timeout(&answer) {
            return answer;
        }
    }
    anyhow::bail!("no answer from {to}")
}

fn socket_of(sandbox: &Sandbox, dialer: Dialer) -> Result<UdpSocket> {
    let socket = dialer.udp_socket(sandbox)?;
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    Ok(socket)
}

fn is_timeout<T>(result: &Result<T>) -> bool {
    result.as_ref().is_err_and(|error| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    })
}

/// A socket that asks all name servers at the same time, as resolvers do.
struct Resolver {
    dialer: Dialer,
    socket: UdpSocket,
}

/// An answer: the name of the server, and the sender's address.
type Answer = (String, SocketAddr);

impl Resolver {
    fn new(sandbox: &Sandbox, dialer: Dialer) -> Result<Self> {
        let socket = socket_of(sandbox, dialer)?;
        Ok(Self { dialer, socket })
    }

    fn ask_all(&self, servers: &[(Vip, &str)]) -> Result<()> {
        for (vip, _) in servers {
            let to = self.dialer.address(*vip, DNS);
            self.socket.send_to(b"who?", to)?;
        }
        Ok(())
    }

    /// Waits for an answer of each name server, and returns the answers with a wrong address or server. Asks
    /// again if a datagram was lost, as may happen under load.
    fn wrong_answers(&self) -> Result<Vec<Answer>> {
        let mut wrong = Vec::new();
        let mut missing = RESOLVERS.to_vec();
        let mut losses = 0;
        while !missing.is_empty() {
            let answer = receive(&self.socket);
            if is_timeout(&answer) && losses < 20 {
                losses += 1;
                self.ask_all(&missing)?;
                continue;
            }
            let answer = answer?;
            missing.retain(|(_, server)| *server != answer.0);
            let is_right = RESOLVERS.iter().any(|(vip, server)| {
                answer
                    == (
                        (*server).to_owned(),
                        self.dialer.reported_address(*vip, DNS),
                    )
            });
            if !is_right {
                wrong.push(answer);
            }
        }
        Ok(wrong)
    }
}

/// The datagrams that the attacker sends, on all CPUs.
struct Flood {
    to: Vec<SocketAddr>,
    sent: AtomicU64,
    stop: AtomicBool,
}

impl Flood {
    /// Sends to all addresses, each time on a new socket, and keeps some of the sockets open.
    fn send(&self, sandbox: &Sandbox) -> Result<()> {
        let mut open = VecDeque::new();
        while !self.stop.load(Ordering::Relaxed) {
            let socket = UdpSocket::from(sandbox.socket(Domain::IPV4, Type::DGRAM)?);
            for to in &self.to {
                if socket.send_to(b"flood", to).is_ok() {
                    self.sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            open.push_back(socket);
            if open.len() > OPEN {
                open.pop_front();
            }
        }
        Ok(())
    }

    /// Waits until the attacker has sent this many more datagrams.
    fn until_grown(&self, by: u32) -> Result<()> {
        let by = u64::from(LoadScale::from_environment().count(by));
        let before = self.sent.load(Ordering::Relaxed);
        wait::until(CHANGE_TIMEOUT, || {
            self.sent.load(Ordering::Relaxed) >= before + by
        })
    }

    /// Runs `action` while the flood is at full rate.
    fn during<T>(&self, sandbox: &Sandbox, action: impl FnOnce() -> Result<T>) -> Result<T> {
        let cpus = thread::available_parallelism()?.get();
        thread::scope(|scope| {
            let senders: Vec<_> = (0..cpus)
                .map(|_| scope.spawn(|| self.send(sandbox)))
                .collect();
            let result = self.until_grown(MIN_FLOOD).and_then(|()| action());
            let grown = self.until_grown(MIN_FLOOD);
            self.stop.store(true, Ordering::Relaxed);
            for sender in senders {
                sender.join().ok().context("a sender panicked")??;
            }
            grown.and(result)
        })
    }
}

#[test]
fn a_resolver_gets_every_answer_from_the_right_address_beside_a_flood() -> Result<()> {
    let scene = start()?;
    let node = &scene.node;
    let attacker = node.pod("attacker")?;
    // Nothing answers the flood.
    let sink = node.pod("sink")?;
    for (number, vip) in FLOODED.into_iter().enumerate() {
        let name = format!("flooded-{number}");
        let service = with_ports(&name, vip, FLOODED_PORTS).backends([sink.v4(), sink.v6()]);
        node.apply(service)?;
        until_backends(node, &name, 1)?;
    }
    let ports = FIRST_PORT..FIRST_PORT + FLOODED_PORTS;
    let to = |vip: Vip| {
        ports
            .clone()
            .map(move |port| (IpAddr::from(vip.v4), port).into())
    };
    let flood = Flood {
        to: FLOODED.into_iter().flat_map(to).collect(),
        sent: AtomicU64::new(0),
        stop: AtomicBool::new(false),
    };
    let dialers = [Dialer::V4, Dialer::V6, Dialer::Mapped];
    let sockets = dialers.map(|dialer| Resolver::new(&scene.client, dialer));
    let sockets: Vec<_> = sockets.into_iter().collect::<Result<_>>()?;
    let answers = LoadScale::from_environment().count(ANSWERS).max(90);

    let reasons = ["translation_lost", "overflowed"];
    let (wrong, increases) = count_during(node, &reasons, || {
        flood.during(&attacker, || {
            let mut wrong = Vec::new();
            for _ in 0..answers / 9 {
                for socket in &sockets {
                    socket.ask_all(&RESOLVERS)?;
                }
                // The name servers take a while, as real ones do.
                flood.until_grown(SLOW_ANSWER)?;
                for socket in &sockets {
                    wrong.extend(socket.wrong_answers()?);
                }
            }
            Ok(wrong)
        })
    })?;

    ensure!(
        wrong.is_empty(),
        "{} of {answers} answers are wrong, such as {:?}",
        wrong.len(),
        wrong.first()
    );
    // The attacker's own translations are lost, and this is counted.
    ensure!(increases.iter().all(|count| *count > 0), "{increases:?}");
    // The attacker's sockets are closed.
    wait::until(CHANGE_TIMEOUT, || {
        shared_translations(&scene).is_ok_and(|count| count == 0)
    })
    .with_context(|| format!("{:?} translations stay", shared_translations(&scene)))
}

#[test]
fn a_socket_with_hundreds_of_peers_keeps_the_backend_of_each() -> Result<()> {
    let scene = start()?;
    for dialer in [Dialer::V4, Dialer::V6, Dialer::Mapped] {
        let socket = socket_of(&scene.client, dialer)?;
        let round = |ports: u16| -> Result<BTreeMap<u16, String>> {
            let ports = FIRST_PORT..FIRST_PORT + ports;
            ports
                .map(|port| {
                    let (server, sender) = ask(&socket, dialer.address(PEERS, port))?;
                    ensure_eq("sender", sender, dialer.reported_address(PEERS, port))?;
                    Ok((port, server))
                })
                .collect()
        };

        let reasons = ["overflowed", "translation_lost"];
        let (few, increases) = count_during(&scene.node, &reasons, || {
            let first = round(OWN_TRANSLATIONS)?;
            ensure_eq("backends", round(OWN_TRANSLATIONS)?, first.clone())?;
            Ok(first)
        })?;
        ensure_eq("in the socket's own storage", increases, vec![0, 0])?;

        let first = round(PEER_PORTS)?;
        ensure!(
            few.iter()
                .all(|(port, server)| first.get(port) == Some(server))
        );
        let (again, increases) =
            count_during(&scene.node, &["translated", "translation_lost"], || {
                Ok([round(PEER_PORTS)?, round(PEER_PORTS)?])
            })?;
        for again in again {
            ensure_eq("backends", again, first.clone())?;
        }
        ensure_eq("new choices, lost", increases, vec![0, 0])?;
        ensure!(shared_translations(&scene)? > 0);
        drop(socket);
        ensure_eq("after the close", shared_translations(&scene)?, 0)?;
    }
    Ok(())
}

/// Expects that the map of shared translations becomes empty once a socket is closed. A child process that another
/// test has just started may hold a copy of the socket until its exec.
fn expect_no_shared_translations(scene: &Scene) -> Result<()> {
    let is_empty = || shared_translations(scene).is_ok_and(|count| count == 0);
    wait::until(CHANGE_TIMEOUT, is_empty).context("translations of a closed socket are left")
}

#[test]
fn a_socket_that_uses_too_many_addresses_loses_only_its_own_translations() -> Result<()> {
    let scene = start()?;
    let dialer = Dialer::V4;
    let send_to_all = |socket: &UdpSocket| -> Result<()> {
        for port in FIRST_PORT..FIRST_PORT + PEER_PORTS {
            ask(socket, dialer.address(PEERS, port))?;
        }
        Ok(())
    };
    let reasons = ["overflowed", "translation_lost"];
    let open = |scene: &Scene| socket_of(&scene.client, dialer);

    // Six sockets have more translations than the map has room for.
    let sockets: Vec<_> = (0..6).map(|_| open(&scene)).collect::<Result<_>>()?;
    let (_, increases) = count_during(&scene.node, &reasons, || {
        sockets.iter().try_for_each(send_to_all)
    })?;
    ensure!(increases.iter().all(|count| *count > 0), "{increases:?}");
    ensure!(shared_translations(&scene)? > 0);
    let metrics = scene.node.metrics()?;
    ensure!(metrics.contains("translation_lost"), "{metrics}");

    // Another socket needs no room in the map.
    let socket = open(&scene)?;
    for _ in 0..3 {
        for (vip, server) in RESOLVERS {
            dialer.expect_answer(&socket, vip, DNS, server)?;
        }
    }
    drop(sockets);
    expect_no_shared_translations(&scene)
}

#[test]
fn a_socket_that_loses_its_last_translation_leaves_nothing_in_the_shared_map() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::OwnOptmem])? {
        return Ok(());
    }
    let scene = start()?;
    let dialer = Dialer::V4;
    let socket = socket_of(&scene.client, dialer)?;
    for port in FIRST_PORT..FIRST_PORT + PEER_PORTS {
        ask(&socket, dialer.address(PEERS, port))?;
    }
    scene.client.sysctl("net.core.optmem_max", "1")?;

    // The translation is removed from `origin`, but there is no memory for the next one.
    let sent = socket.send_to(b"who?", dialer.address(PEERS, FIRST_PORT));
    ensure_eq("error", errno(sent), Errno::ENOMEM)?;
    ensure!(shared_translations(&scene)? > 0);

    drop(socket);
    expect_no_shared_translations(&scene)
}

#[test]
fn a_socket_that_connects_directly_to_a_backend_of_many_vips_gets_answers_from_the_backend()
-> Result<()> {
    let scene = start()?;
    let service = with_ports("one", FLOODED[0], OWN_TRANSLATIONS / 2);
    scene
        .node
        .apply(service.backends(scene.addresses(&["one"])?))?;
    until_backends(&scene.node, "one", 1)?;
    let backend = Vip::of_pod(scene.backend("one")?);
    for dialer in Dialer::UDP {
        let socket = socket_of(&scene.client, dialer)?;
        for port in FIRST_PORT..FIRST_PORT + OWN_TRANSLATIONS / 2 {
            ask(&socket, dialer.address(FLOODED[0], port))?;
        }

        socket.connect(dialer.address(backend, DNS_TARGET))?;

        let expected = dialer.reported_address(backend, DNS_TARGET);
        socket.send(b"who?")?;
        let answer = receive(&socket)?;
        ensure_eq("answer", answer, ("one".to_owned(), expected))?;
        ensure_eq("peer", socket.peer_addr()?, expected)?;
    }
    Ok(())
}
