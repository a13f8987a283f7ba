//! What the tests here share: Services with addresses of both families, and sockets that dial them
//! in every way there is.

use std::{
    collections::BTreeSet,
    fmt::Debug,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use socket2::{Domain, Socket, Type};
use tunnel_common::LAYOUT_VERSION;
use tunnel_tests::{
    feature::{self, Feature},
    instance::Instance,
    manifest::{Protocol, Service},
    place::{ANSWER, Place, connect_within},
    pod::{Pod, Server},
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

    /// Both, as items of the `ingress` of a load balancer in YAML.
    pub(crate) fn ingress(self) -> String {
        format!("{{ip: \"{}\"}}, {{ip: \"{}\"}}", self.v4, self.v6)
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
            .port(Protocol::TCP, HTTP, HTTP_TARGET)
            .port(Protocol::UDP, DNS, DNS_TARGET)
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

    /// Connects over TCP; the name of the server that answers.
    pub(crate) fn dial(self, place: &Place, vip: Vip, port: u16) -> Result<String> {
        http(self.connect(place, vip, port)?)
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

    /// A connected UDP socket.
    pub(crate) fn connected(self, place: &Place, vip: Vip, port: u16) -> io::Result<UdpSocket> {
        let socket = self.udp(place)?;
        socket.connect(self.to(vip, port))?;
        Ok(socket)
    }

    /// A connected UDP socket that this server has answered.
    pub(crate) fn asked(
        self,
        place: &Place,
        vip: Vip,
        port: u16,
        server: &str,
    ) -> Result<UdpSocket> {
        let socket = self.connected(place, vip, port)?;
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
pub(crate) fn http(stream: TcpStream) -> Result<String> {
    request(stream, "/").map(|(_, name)| name)
}

/// The code and body of an answer over HTTP.
pub(crate) fn get(place: &Place, at: SocketAddr, path: &str) -> Result<(u16, String)> {
    request(place.connect(at)?, path)
}

fn request(mut stream: TcpStream, path: &str) -> Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
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

/// Whether an error is that of an address without a route: of a connect that nothing redirects.
pub(crate) fn is_nowhere(error: Errno) -> bool {
    matches!(error, Errno::EHOSTUNREACH | Errno::ENETUNREACH)
}

/// Asserts that an attempt fails with this error, and is counted once.
pub(crate) fn is_refused<T>(
    instance: &Instance,
    reason: &str,
    error: Errno,
    attempt: impl FnOnce() -> io::Result<T>,
) -> Result<()> {
    let (failed, grown) = counted(instance, &[reason], || Ok(errno(attempt())))?;
    same("error, counted", (failed, grown), (error, vec![1]))
}

/// Tells a story of each family; an error names the family.
pub(crate) fn each_family(story: impl Fn(Family) -> Result<()>) -> Result<()> {
    let told = |family: Family| story(family).context(family.label());
    [Family::V4, Family::V6].into_iter().try_for_each(told)
}

/// Runs a command, whose words hold no spaces, to its end; it must be a success.
pub(crate) fn run(place: &Place, command: &str) -> Result<String> {
    place.run(&command.split(' ').collect::<Vec<_>>())
}

/// Lists the local routes of a protocol in a place, of both families.
pub(crate) fn local_routes(place: &Place, protocol: u8) -> Result<String> {
    let of = |family: &str| {
        let command = format!("ip {family} route show table local proto {protocol}");
        run(place, &command)
    };
    Ok(of("-4")? + &of("-6")?)
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
    until_each_has(instance, name, "backends", count)
}

/// Waits until every port of a Service tells of so many things of a kind.
pub(crate) fn until_each_has(
    instance: &Instance,
    name: &str,
    kind: &str,
    count: usize,
) -> Result<()> {
    let what = format!("{kind} of {name}");
    until_same(&what, BTreeSet::from([Some(count)]), || {
        let ports = ports(&instance.services()?, name);
        let counts = ports.iter().map(|port| port[kind].as_array().map(Vec::len));
        Ok(counts.collect::<BTreeSet<_>>())
    })
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
