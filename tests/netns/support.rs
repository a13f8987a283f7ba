//! What the tests here share: Services with addresses of both families, and sockets that dial them
//! in every way there is.

use std::{
    collections::BTreeSet,
    fmt::Debug,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use socket2::{Domain, SockRef, Socket, Type};
use tunnel_common::LAYOUT_VERSION;
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
    instance::Instance,
    load::{self, Enough, Plan, Report, udp::Mode},
    manifest::{Protocol, Service},
    place::{ANSWER, Place, connect_within},
    pod::{Pod, Server},
    scale::Scale,
    serve::{Kind, Listener},
    topology::{HOST_V4, HOST_V6},
    wait,
};
use tunnel_userspace::model::Family;

/// How long a change may take to be programmed.
pub(crate) const CHANGE: Duration = Duration::from_secs(10);

/// The ports of every Service here, and those of its backends.
pub(crate) const HTTP: u16 = 80;
pub(crate) const HTTP_TARGET: u16 = 8080;
pub(crate) const DNS: u16 = 53;
pub(crate) const DNS_TARGET: u16 = 5353;

/// An address in each family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vip {
    pub(crate) v4: Ipv4Addr,
    pub(crate) v6: Ipv6Addr,
}

impl Vip {
    /// ClusterIPs with this last number.
    pub(crate) const fn of(number: u8) -> Self {
        Self {
            v4: Ipv4Addr::new(10, 96, 0, number),
            #[expect(clippy::as_conversions, reason = "`From` is not const")]
            v6: Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number as u16),
        }
    }

    /// The addresses of a pod.
    pub(crate) fn of_pod(pod: &Pod) -> Self {
        let (IpAddr::V4(v4), IpAddr::V6(v6)) = (pod.v4(), pod.v6()) else {
            panic!("a pod has an address in each family");
        };
        Self { v4, v6 }
    }

    /// Both, IPv4 first.
    pub(crate) fn ips(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Both, as items of a list in YAML.
    pub(crate) fn listed(self) -> String {
        format!("\"{}\", \"{}\"", self.v4, self.v6)
    }

    /// Adds both to a link of a place.
    pub(crate) fn add_to(self, place: &Place, link: &str) -> Result<()> {
        let Self { v4, v6 } = self;
        place.ip(&format!(
            "addr add {v4}/32 dev {link}\naddr add {v6}/128 dev {link} nodad\n"
        ))
    }

    /// Deletes both from a link of a place.
    pub(crate) fn delete_from(self, place: &Place, link: &str) -> Result<()> {
        let Self { v4, v6 } = self;
        place.ip(&format!(
            "addr del {v4}/32 dev {link}\naddr del {v6}/128 dev {link}\n"
        ))
    }

    /// A Service with these ClusterIPs, HTTP over TCP and questions over UDP.
    pub(crate) fn service(self, name: &str) -> Service {
        Service::new(name, self.ips())
            .port(Protocol::Tcp, HTTP, HTTP_TARGET)
            .port(Protocol::Udp, DNS, DNS_TARGET)
    }
}

/// The addresses of the host.
pub(crate) const HOST: Vip = Vip {
    v4: HOST_V4,
    v6: HOST_V6,
};

/// Serves what [`Vip::service`] leads to.
pub(crate) fn serve(pod: &Pod) -> Result<Server> {
    pod.serve(&[
        Listener::new(Kind::Http, HTTP_TARGET),
        Listener::new(Kind::Udp, DNS_TARGET),
    ])
}

/// The addresses of pods, as backends of a Service.
pub(crate) fn addresses(pods: &[&Pod]) -> Vec<IpAddr> {
    let both = |pod: &Pod| [pod.v4(), pod.v6()];
    pods.iter().flat_map(|pod| both(pod)).collect()
}

/// How long a client may be without its backend: 100 ms is what is wanted, and the rest is for
/// machines that are slow or busy.
pub(crate) const RECOVERY: Duration = Duration::from_secs(1);

/// How long loads run that nobody ends.
const LONGEST: Duration = Duration::from_secs(600);

/// A load on a Service of every protocol and family, in a thread each.
pub(crate) fn loads<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    place: &'scope Place,
    vip: Vip,
    enough: &Enough,
) -> Vec<thread::ScopedJoinHandle<'scope, Report>> {
    let rate = Scale::from_environment().count(200);
    let plan = |to: SocketAddr| Plan::new(to, rate, LONGEST).until(enough);
    let sockets = move |domain, kind| place.socket(domain, kind);
    let mut loads = Vec::new();
    for way in [Way::V4, Way::V6] {
        let http = plan(way.to(vip, HTTP));
        loads.push(scope.spawn(move || load::tcp::run(&http, &sockets)));
        for mode in [Mode::Connected, Mode::Unconnected] {
            let dns = plan(way.to(vip, DNS));
            loads.push(scope.spawn(move || load::udp::run(&dns, mode, &sockets)));
        }
    }
    loads
}

/// How long something is repeated at least: a small load has led to each of two backends then.
const REPEATED: Duration = Duration::from_millis(2500);

/// Does something again and again, at least so many times.
pub(crate) fn repeated(times: usize, story: impl Fn(usize) -> Result<()>) -> Result<()> {
    let start = Instant::now();
    let mut number = 0;
    while number < times || start.elapsed() < REPEATED {
        story(number)?;
        number += 1;
    }
    Ok(())
}

/// What loads came to, once they have ended.
pub(crate) fn reports(loads: Vec<thread::ScopedJoinHandle<'_, Report>>) -> Result<Vec<Report>> {
    let join = |load: thread::ScopedJoinHandle<'_, Report>| load.join().ok();
    loads
        .into_iter()
        .map(|load| join(load).context("a load panicked"))
        .collect()
}

/// That every attempt was answered, by each of these servers and no other.
pub(crate) fn all_answered(reports: &[Report], servers: &[&str]) -> Result<()> {
    for report in reports {
        ensure!(report.failed() == 0, "{report:?}");
        same("answered", report.answered, report.attempts)?;
        ensure!(report.attempts > 0, "no attempt was made");
        same("other peers", report.other_peer, 0)?;
        let seen: BTreeSet<&str> = report.servers.keys().map(String::as_str).collect();
        same("servers", seen, servers.iter().copied().collect())?;
    }
    Ok(())
}

/// A family of socket, and of the address that it dials.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
    /// An IPv6 socket that dials a v4-mapped address.
    Mapped,
    /// An IPv6 socket that is given an IPv4 address; UDP only.
    V4OnV6,
}

impl Way {
    /// Those that TCP has.
    pub(crate) const TCP: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];
    /// Those that UDP has.
    pub(crate) const UDP: [Self; 4] = [Self::V4, Self::V6, Self::Mapped, Self::V4OnV6];

    const fn domain(self) -> Domain {
        match self {
            Self::V4 => Domain::IPV4,
            Self::V6 | Self::Mapped | Self::V4OnV6 => Domain::IPV6,
        }
    }

    /// The family of the packets.
    pub(crate) const fn family(self) -> Family {
        match self {
            Self::V4 | Self::Mapped | Self::V4OnV6 => Family::V4,
            Self::V6 => Family::V6,
        }
    }

    /// What is dialled.
    pub(crate) fn to(self, vip: Vip, port: u16) -> SocketAddr {
        match self {
            Self::V4 | Self::V4OnV6 => (vip.v4, port).into(),
            Self::V6 => (vip.v6, port).into(),
            Self::Mapped => (vip.v4.to_ipv6_mapped(), port).into(),
        }
    }

    /// What an IPv6 socket calls what was dialled.
    pub(crate) fn shown(self, vip: Vip, port: u16) -> SocketAddr {
        match self {
            Self::V4 => (vip.v4, port).into(),
            Self::V6 => (vip.v6, port).into(),
            Self::Mapped | Self::V4OnV6 => (vip.v4.to_ipv6_mapped(), port).into(),
        }
    }

    pub(crate) fn tcp(self, place: &Place) -> io::Result<Socket> {
        let socket = place.socket(self.domain(), Type::STREAM)?;
        socket.set_read_timeout(Some(ANSWER))?;
        Ok(socket)
    }

    /// A TCP connection.
    pub(crate) fn connect(self, place: &Place, vip: Vip, port: u16) -> io::Result<TcpStream> {
        let socket = self.tcp(place)?;
        connect_within(&socket, self.to(vip, port), ANSWER)?;
        Ok(socket.into())
    }

    /// Connects over TCP: the peer is shown as it was dialled, and this server answers.
    pub(crate) fn is_served(self, place: &Place, vip: Vip, port: u16, server: &str) -> Result<()> {
        let story = || {
            let stream = self.connect(place, vip, port)?;
            same("peer", stream.peer_addr()?, self.shown(vip, port))?;
            same("server", http(stream)?, server)
        };
        story().with_context(|| format!("{self:?} to port {port} of {vip:?}"))
    }

    /// Sends a datagram: this server answers, and the sender is shown as it was asked.
    pub(crate) fn is_answered(
        self,
        socket: &UdpSocket,
        vip: Vip,
        port: u16,
        server: &str,
    ) -> Result<()> {
        let expected = (server.to_owned(), self.shown(vip, port));
        ask_to(socket, self.to(vip, port))
            .and_then(|answer| same("answer", answer, expected))
            .with_context(|| format!("{self:?} to UDP port {port} of {vip:?}"))
    }

    /// A connected UDP socket that this server has answered.
    pub(crate) fn asked(
        self,
        place: &Place,
        vip: Vip,
        port: u16,
        server: &str,
    ) -> Result<UdpSocket> {
        let socket = self.udp(place)?;
        socket.connect(self.to(vip, port))?;
        same("server", ask(&socket)?, server)?;
        Ok(socket)
    }

    /// A UDP socket that isn't bound or connected yet.
    pub(crate) fn udp(self, place: &Place) -> io::Result<UdpSocket> {
        let socket = place.socket(self.domain(), Type::DGRAM)?;
        socket.set_read_timeout(Some(ANSWER))?;
        Ok(socket.into())
    }
}

/// The name that an HTTP server answers with.
pub(crate) fn http(mut stream: TcpStream) -> Result<String> {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, name) = answer.split_once("\r\n\r\n").context("no whole answer")?;
    Ok(name.to_owned())
}

/// The code and body of an answer over HTTP.
pub(crate) fn get(place: &Place, at: SocketAddr, path: &str) -> Result<(u16, String)> {
    let mut stream = place.connect(at)?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no whole answer")?;
    let code = head.split(' ').nth(1).context("no code in the answer")?;
    Ok((code.parse()?, body.to_owned()))
}

/// The name that a server answers a datagram with, and the sender that is shown.
pub(crate) fn receive(socket: &UdpSocket) -> Result<(String, SocketAddr)> {
    let mut answer = [0; 256];
    let (length, from) = socket.recv_from(&mut answer)?;
    Ok((server(&answer[..length])?, from))
}

/// The name in an answer to a datagram.
pub(crate) fn server(answer: &[u8]) -> Result<String> {
    let text = str::from_utf8(answer)?;
    let (name, _) = text.split_once(' ').context("no name in the answer")?;
    Ok(name.to_owned())
}

/// Sends a datagram on a connected socket; the name that it is answered with.
pub(crate) fn ask(socket: &UdpSocket) -> Result<String> {
    socket.send(b"who?")?;
    receive(socket).map(|(name, _)| name)
}

/// Sends a datagram; the name that it is answered with, and the sender that is shown.
pub(crate) fn ask_to(socket: &UdpSocket, to: SocketAddr) -> Result<(String, SocketAddr)> {
    socket.send_to(b"who?", to)?;
    receive(socket)
}

/// The error of a TCP connect, and of a UDP one or of a datagram, that find no way. Where it can't be
/// set, it is that of an address without a route.
pub(crate) fn no_way() -> Result<(Errno, Errno)> {
    Ok(if feature::is_there(Feature::SetRetval)? {
        (Errno::EHOSTUNREACH, Errno::EHOSTUNREACH)
    } else {
        (Errno::ENETUNREACH, Errno::EPERM)
    })
}

/// The error of a call that must fail.
pub(crate) fn errno<T>(result: io::Result<T>) -> Errno {
    let error = result.err().and_then(|error| error.raw_os_error());
    Errno::from_raw(error.unwrap_or_default())
}

/// Waits for an answer that never comes: the socket is ended instead.
pub(crate) fn is_ended(socket: &UdpSocket) -> Result<()> {
    let error = errno(socket.recv(&mut [0; 64]));
    same("error", error, Errno::ECONNABORTED)?;
    // The kernel wakes whoever waits a moment before it takes the peer away (`udp_abort`).
    wait::until(CHANGE, || socket.peer_addr().is_err()).context("it keeps its peer")
}

/// Waits until every port of a Service that is programmed has this many backends.
pub(crate) fn until_backends(instance: &Instance, name: &str, count: usize) -> Result<()> {
    let len = |port: &serde_json::Value| port["backends"].as_array().map_or(0, Vec::len);
    until_same(
        &format!("backends of {name}"),
        BTreeSet::from([count]),
        || {
            let ports = ports(&instance.services()?, name);
            Ok(ports.iter().map(len).collect::<BTreeSet<_>>())
        },
    )
}

/// Waits until a Service is known no more.
pub(crate) fn until_gone(instance: &Instance, name: &str) -> Result<()> {
    until_same(name, 0, || Ok(ports(&instance.services()?, name).len()))
}

/// The ports of a Service, as the daemon tells of them.
pub(crate) fn ports(services: &serde_json::Value, name: &str) -> Vec<serde_json::Value> {
    let services = services.as_array().into_iter().flatten();
    services
        .filter(|service| service["name"] == name)
        .filter_map(|service| service["ports"].as_array())
        .flatten()
        .cloned()
        .collect()
}

/// How much a reason's counter grows while something is done.
pub(crate) fn counted<T>(
    instance: &Instance,
    reasons: &[&str],
    body: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<u64>)> {
    let read = || -> Result<Vec<u64>> {
        reasons
            .iter()
            .map(|reason| instance.reason(reason))
            .collect()
    };
    let before = read()?;
    let done = body()?;
    let after = read()?;
    let grown = after
        .iter()
        .zip(&before)
        .map(|(after, before)| after - before);
    Ok((done, grown.collect()))
}

/// Each place of a node from which Services are dialled alike.
pub(crate) fn clients<'a>(host: &'a Place, pod: &'a Pod) -> [(&'static str, &'a Place); 2] {
    [("host", host), ("pod", pod)]
}

/// The name of the folder that the maps are pinned in, and what stands behind it.
pub(crate) fn maps_folder(rest: &str) -> String {
    format!("v{LAYOUT_VERSION}{rest}")
}

/// That two things are alike, with what was tried.
pub(crate) fn same<A: PartialEq<B> + Debug, B: Debug>(
    what: &str,
    seen: A,
    expected: B,
) -> Result<()> {
    ensure!(seen == expected, "{what}: {seen:?}, expected {expected:?}");
    Ok(())
}

/// Waits until two things are alike; an error says what was seen last.
pub(crate) fn until_same<A: PartialEq<B> + Debug, B: Debug>(
    what: &str,
    expected: B,
    mut look: impl FnMut() -> Result<A>,
) -> Result<()> {
    let mut last = None;
    wait::until(CHANGE, || {
        let seen = last.insert(look());
        seen.as_ref().is_ok_and(|seen| *seen == expected)
    })
    .with_context(|| format!("{what}: {last:?}, expected {expected:?}"))
}

/// Sockets that a test listens with in a place, over TCP and UDP, at one address of each family.
pub(crate) struct Listening {
    tcp: [TcpListener; 2],
    udp: [UdpSocket; 2],
}

impl Listening {
    pub(crate) fn at(place: &Place, ips: [IpAddr; 2], [http, dns]: [u16; 2]) -> Result<Self> {
        let tcp = ips.map(|ip| {
            let listener = place.listen((ip, http))?;
            SockRef::from(&listener).set_read_timeout(Some(ANSWER))?;
            io::Result::Ok(listener)
        });
        let udp = ips.map(|ip| place.udp((ip, dns)));
        let ([tcp4, tcp6], [udp4, udp6]) = (tcp, udp);
        Ok(Self {
            tcp: [tcp4?, tcp6?],
            udp: [udp4?, udp6?],
        })
    }

    /// The address of the next client that connects in this way.
    pub(crate) fn accept(&self, way: Way) -> Result<SocketAddr> {
        let [v4, v6] = &self.tcp;
        let listener = match way.family() {
            Family::V4 => v4,
            Family::V6 => v6,
        };
        Ok(listener.accept().context("accept")?.1)
    }

    /// The socket that gets the datagrams of this way.
    pub(crate) const fn udp(&self, way: Way) -> &UdpSocket {
        let [v4, v6] = &self.udp;
        match way.family() {
            Family::V4 => v4,
            Family::V6 => v6,
        }
    }
}
