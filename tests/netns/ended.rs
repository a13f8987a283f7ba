//! Connected sockets whose backend has gone: which are ended, which are not, and how soon.

use std::{
    fs,
    net::{TcpStream, UdpSocket},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    clock::Instant,
    node::Node,
    place::Place,
    pod::{Pod, Server},
    scale::Scale,
    wait,
};

use crate::{
    reach::{self, BALANCER, EXTERNAL},
    support::{
        CHANGE, DNS, DNS_TARGET, HTTP, Vip, Way, addresses, ask, ask_to, clients, errno, http,
        receive, same, serve,
    },
};

const WEB: Vip = Vip::of(10);
const OTHER: Vip = Vip::of(11);

/// How long a client may be without its backend: 100 ms is what is wanted, and the rest is for
/// machines that are slow or busy.
const RECOVERY: Duration = Duration::from_secs(1);

/// A node with a client and a Service, whose backend is `one` at first.
struct Stage {
    node: Node,
    client: Arc<Pod>,
    one: Arc<Pod>,
    two: Arc<Pod>,
    server: Server,
    _other: Server,
}

impl Stage {
    fn new() -> Result<Self> {
        let stage = Self::set()?;
        stage.node.start()?;
        Ok(stage)
    }

    /// With these sockets to be ended.
    fn ending(protocols: &str) -> Result<Self> {
        let stage = Self::set()?;
        stage.end(protocols)?;
        stage.node.start()?;
        Ok(stage)
    }

    fn set() -> Result<Self> {
        let node = Node::new()?;
        let client = node.pod("client")?;
        let (one, two) = (node.pod("one")?, node.pod("two")?);
        let (server, other) = (serve(&one)?, serve(&two)?);
        let stage = Self {
            node,
            client,
            one,
            two,
            server,
            _other: other,
        };
        stage.lead_to(&[&stage.one])?;
        Ok(stage)
    }

    /// Says of which protocols sockets are ended, from the next start on.
    fn end(&self, protocols: &str) -> Result<()> {
        let config = fs::read_to_string(self.node.config_path())?;
        let config = config.split("sockets:").next().unwrap_or_default();
        let config = format!("{config}sockets: {{ end: {protocols} }}\n");
        fs::write(self.node.config_path(), config).context("cannot write the config")
    }

    fn lead_to(&self, backends: &[&Pod]) -> Result<()> {
        self.node
            .apply(WEB.service("web").backends(addresses(backends)))
    }

    /// From each place, in each of these ways.
    fn each(&self, ways: &[Way]) -> Vec<Client<'_>> {
        let clients = clients(self.node.host(), &self.client);
        let each = |(from, place)| {
            ways.iter().map(move |way| Client {
                from,
                place,
                way: *way,
            })
        };
        clients.into_iter().flat_map(each).collect()
    }

    /// A connected UDP socket in each way that was answered by `one`.
    fn connected(&self) -> Result<Vec<(Client<'_>, UdpSocket)>> {
        self.open(&Way::UDP, |client| {
            let socket = client.way.udp(client.place)?;
            socket.connect(client.way.to(WEB, DNS))?;
            same("server", ask(&socket)?, "one".to_owned())?;
            Ok(socket)
        })
    }

    /// A connection over TCP in each way.
    fn streams(&self) -> Result<Vec<(Client<'_>, TcpStream)>> {
        self.open(&Way::TCP, |client| {
            Ok(client.way.connect(client.place, WEB, HTTP)?)
        })
    }

    /// Opens something from each place, in each of these ways.
    fn open<T>(
        &self,
        ways: &[Way],
        open: impl Fn(&Client<'_>) -> Result<T>,
    ) -> Result<Vec<(Client<'_>, T)>> {
        let mut all = Vec::new();
        for client in self.each(ways) {
            let opened = open(&client).with_context(|| client.to_string())?;
            all.push((client, opened));
        }
        Ok(all)
    }

    fn asked(&self) -> Result<u64> {
        Ok(self.server.record()?.total().answered)
    }

    /// Waits until as many sockets were ended, and no more.
    fn until_ended(&self, count: u64) -> Result<()> {
        let ended = || self.node.reason("socket_ended").unwrap_or(0);
        wait::until(CHANGE, || ended() >= count).with_context(|| format!("{} ended", ended()))?;
        same("ended", ended(), count)
    }
}

/// A place and a way to dial from it.
#[derive(Clone, Copy)]
struct Client<'a> {
    from: &'static str,
    place: &'a Place,
    way: Way,
}

impl std::fmt::Display for Client<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} from the {}", self.way, self.from)
    }
}

/// Waits for an answer that never comes: the socket is ended instead.
fn is_ended(socket: &UdpSocket) -> Result<()> {
    let error = errno(socket.recv(&mut [0; 64]));
    same("error", error, Errno::ECONNABORTED)?;
    // The kernel wakes whoever waits a moment before it takes the peer away (`udp_abort`).
    wait::until(CHANGE, || socket.peer_addr().is_err()).context("it keeps its peer")
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn a_connected_resolver_has_another_backend_at_once_when_its_own_is_removed() -> Result<()> {
    let stage = Stage::new()?;
    let sockets = stage.connected()?;
    let count = u64::try_from(sockets.len())?;

    let longest = thread::scope(|scope| -> Result<_> {
        let mut recovered = Vec::new();
        for (client, socket) in sockets {
            recovered.push(scope.spawn(move || -> Result<Instant> {
                is_ended(&socket).with_context(|| client.to_string())?;
                socket.connect(client.way.to(WEB, DNS))?;
                same("server", ask(&socket)?, "two".to_owned())?;
                Ok(Instant::now())
            }));
        }
        let start = Instant::now();
        stage.lead_to(&[&stage.two])?;
        let mut longest = Duration::ZERO;
        for client in recovered {
            let at = client.join().ok().context("a client panicked")??;
            longest = longest.max(at.duration_since(start));
        }
        Ok(longest)
    })?;

    let look = stage.node.status()?["sockets"]["lastLookSeconds"].clone();
    println!("recovered within {longest:?} of the change; the look took {look} s");
    stage.until_ended(count)?;
    let allowed = Scale::from_environment().patience(RECOVERY);
    ensure!(longest < allowed, "recovered only after {longest:?}");
    Ok(())
}

#[test]
fn nothing_reaches_the_last_backend_of_a_service_that_lost_it_or_is_deleted() -> Result<()> {
    for is_deleted in [false, true] {
        let stage = Stage::new()?;
        let sockets = stage.connected()?;
        let asked = stage.asked()?;

        if is_deleted {
            stage.node.withdraw("web.yaml")?;
        } else {
            stage.lead_to(&[])?;
        }

        for (client, socket) in &sockets {
            let story = || {
                is_ended(socket)?;
                same("send", errno(socket.send(b"who?")), Errno::EDESTADDRREQ)?;
                if !is_deleted {
                    let refused = socket
                        .connect(client.way.to(WEB, DNS))
                        .map_err(Into::into)
                        .and_then(|()| ask(socket));
                    ensure!(refused.is_err(), "answered");
                }
                Ok(())
            };
            story().with_context(|| client.to_string())?;
        }
        same("datagrams", stage.asked()?, asked)?;
    }
    Ok(())
}

#[test]
fn nothing_reaches_the_last_backend_by_any_other_address_of_its_service_either() -> Result<()> {
    let stage = Stage::set()?;
    let service = reach::service_everywhere;
    stage
        .node
        .apply(service().backends(addresses(&[&stage.one])))?;
    stage.node.start()?;
    let ways = [
        (EXTERNAL, DNS),
        (BALANCER, DNS),
        (reach::HOST, reach::NODE_DNS),
    ];
    let mut sockets = Vec::new();
    for (vip, port) in ways {
        sockets.extend(stage.open(&Way::UDP, |client| {
            let socket = client.way.udp(client.place)?;
            socket.connect(client.way.to(vip, port))?;
            same("server", ask(&socket)?, "one".to_owned())?;
            Ok(socket)
        })?);
    }
    let asked = stage.asked()?;

    stage.node.apply(service())?;

    for (client, socket) in &sockets {
        let story = || {
            is_ended(socket)?;
            same("send", errno(socket.send(b"who?")), Errno::EDESTADDRREQ)
        };
        story().with_context(|| client.to_string())?;
    }
    same("datagrams", stage.asked()?, asked)
}

#[test]
fn a_socket_that_is_not_connected_goes_over_and_still_hears_the_backend_that_went() -> Result<()> {
    let stage = Stage::new()?;
    let late = stage.node.pod("late")?;
    let listener = late.udp(("::", DNS_TARGET))?;
    let sockets = stage.open(&Way::UDP, |client| {
        let socket = client.way.udp(client.place)?;
        let (name, _) = ask_to(&socket, client.way.to(WEB, DNS))?;
        same("server", name, "one".to_owned())?;
        Ok(socket)
    })?;
    let witnesses = stage.connected()?;

    // All flows are moved to the backend that answers late.
    stage.lead_to(&[&late])?;
    stage.until_ended(u64::try_from(witnesses.len())?)?;
    let mut waiting = Vec::new();
    for (client, socket) in sockets {
        socket.send_to(b"who?", client.way.to(WEB, DNS))?;
        let (_, from) = listener.recv_from(&mut [0; 64])?;
        waiting.push((client, socket, from));
    }
    let more = stage.open(&Way::UDP, |client| {
        let socket = client.way.udp(client.place)?;
        socket.connect(client.way.to(WEB, DNS))?;
        Ok(socket)
    })?;

    stage.lead_to(&[&stage.two])?;
    more.iter().try_for_each(|(_, socket)| is_ended(socket))?;

    for (client, socket, from) in &waiting {
        let story = || {
            listener.send_to(b"late answer", from)?;
            let (name, sender) = receive(socket)?;
            same("server", name, "late".to_owned())?;
            same("sender", sender, client.way.shown(WEB, DNS))?;
            let (name, sender) = ask_to(socket, client.way.to(WEB, DNS))?;
            same("server", name, "two".to_owned())?;
            same("sender", sender, client.way.shown(WEB, DNS))
        };
        story().with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(witnesses.len() + more.len())?)
}

#[test]
fn a_connection_over_tcp_goes_on_with_a_backend_that_left_its_service() -> Result<()> {
    let stage = Stage::new()?;
    let streams = stage.streams()?;
    let witnesses = stage.connected()?;

    stage.lead_to(&[&stage.two])?;
    stage.until_ended(u64::try_from(witnesses.len())?)?;

    for (client, stream) in streams {
        same("peer", stream.peer_addr()?, client.way.shown(WEB, HTTP))?;
        let name = http(stream).with_context(|| client.to_string())?;
        same("server", name, "one".to_owned())?;
    }
    Ok(())
}

#[test]
fn a_connection_over_tcp_is_ended_where_the_config_wants_that() -> Result<()> {
    let stage = Stage::ending("[tcp]")?;
    let streams = stage.streams()?;
    let direct = stage
        .client
        .connect(stage.one.at4(crate::support::HTTP_TARGET))?;
    let stays = stage.connected()?;

    stage.lead_to(&[&stage.two])?;

    for (client, stream) in &streams {
        let error = errno(stream.peek(&mut [0]));
        same("error", error, Errno::ECONNABORTED).with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(streams.len())?)?;
    same("server", http(direct)?, "one".to_owned())?;
    for (client, socket) in &stays {
        same("server", ask(socket)?, "one".to_owned()).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn a_socket_that_was_not_sent_to_the_backend_by_its_service_is_left_alone() -> Result<()> {
    let stage = Stage::new()?;
    let one = Vip::of_pod(&stage.one);
    let two = Vip::of_pod(&stage.two);
    let mut direct = Vec::new();
    for client in stage.each(&Way::UDP) {
        let way = client.way;
        // It never knew the Service.
        let plain = way.udp(client.place)?;
        plain.connect(way.to(one, DNS_TARGET))?;
        direct.push((client, plain, "one"));
        // It knew it, then dialled the backend itself.
        let former = way.udp(client.place)?;
        former.connect(way.to(WEB, DNS))?;
        former.connect(way.to(one, DNS_TARGET))?;
        direct.push((client, former, "one"));
        // It asks the Service besides what it is connected to.
        let besides = way.udp(client.place)?;
        besides.connect(way.to(two, DNS_TARGET))?;
        besides.send_to(b"who?", way.to(WEB, DNS))?;
        direct.push((client, besides, "two"));
    }
    let witnesses = stage.connected()?;

    stage.lead_to(&[&stage.two])?;
    stage.until_ended(u64::try_from(witnesses.len())?)?;

    for (client, socket, name) in &direct {
        let story = || same("server", ask(socket)?, (*name).to_owned());
        story().with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn a_socket_that_asked_another_service_since_it_connected_goes_with_its_own_backend() -> Result<()>
{
    let stage = Stage::new()?;
    let other = OTHER.service("other").backends(addresses(&[&stage.two]));
    stage.node.apply(other)?;
    crate::support::until_backends(&stage.node, "other", 1)?;
    let sockets = stage.connected()?;
    for (client, socket) in &sockets {
        socket.send_to(b"who?", client.way.to(OTHER, DNS))?;
    }

    stage.node.withdraw("web.yaml")?;

    for (client, socket) in &sockets {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn what_a_daemon_left_that_was_killed_is_ended_by_the_next_one() -> Result<()> {
    // The first daemon retires the backend and ends nothing, as one that is killed in between.
    let stage = Stage::ending("[]")?;
    let lost = stage.connected()?;
    stage.lead_to(&[&stage.two])?;
    crate::support::until_backends(&stage.node, "web", 1)?;
    let serving = stage.open(&Way::UDP, |client| {
        let socket = client.way.udp(client.place)?;
        wait::until(CHANGE, || {
            let again = socket.connect(client.way.to(WEB, DNS)).is_ok();
            again && ask(&socket).is_ok_and(|name| name == "two")
        })?;
        Ok(socket)
    })?;
    for (client, socket) in &lost {
        same("server", ask(socket)?, "one".to_owned()).with_context(|| client.to_string())?;
    }

    stage.node.kill9()?;
    stage.end("[udp]")?;
    stage.node.start()?;

    for (client, socket) in &lost {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(lost.len())?)?;
    for (client, socket) in &serving {
        same("server", ask(socket)?, "two".to_owned()).with_context(|| client.to_string())?;
    }
    // And what went while there was no daemon.
    stage.node.kill9()?;
    stage.lead_to(&[&stage.one])?;
    stage.node.start()?;
    for (client, socket) in &serving {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(serving.len())?)
}
