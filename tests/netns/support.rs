//! Helpers for all tests: Service addresses in both address families, client sockets of every kind, and
//! assertions.

use std::{
    collections::BTreeSet,
    fmt::Debug,
    fs::File,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    errno::Errno,
    sched::{CloneFlags, setns, unshare},
};
use socket2::{Domain, Socket, Type};
use tunnel_common::LAYOUT_VERSION;
use tunnel_tests::{
    culvert_instance::Instance,
    feature::{self, Feature},
    manifest::{Protocol, Service},
    node_network::{HOST_V4, HOST_V6},
    pod::{Pod, Server},
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    server::{Listener, ServerKind},
    wait,
};
use tunnel_userspace::model::Family;

/// The time limit for the daemon to program a change.
pub(crate) const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// The ports of the Services in these tests, and their target ports.
pub(crate) const HTTP: u16 = 80;
pub(crate) const HTTP_TARGET: u16 = 8080;
pub(crate) const DNS: u16 = 53;
pub(crate) const DNS_TARGET: u16 = 5353;

/// A virtual IP address in each family. Also used for other pairs of an IPv4 and an IPv6 address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vip {
    pub(crate) v4: Ipv4Addr,
    pub(crate) v6: Ipv6Addr,
}

impl Vip {
    /// Returns the pair of ClusterIPs that end in `number`: the last octet (IPv4) or the last group (IPv6).
    pub(crate) const fn of(number: u8) -> Self {
        Self {
            v4: Ipv4Addr::new(10, 96, 0, number),
            #[expect(clippy::as_conversions, reason = "`From` is not const")]
            v6: Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number as u16),
        }
    }

    /// Returns a pod's addresses.
    pub(crate) fn of_pod(pod: &Pod) -> Self {
        let (IpAddr::V4(v4), IpAddr::V6(v6)) = (pod.v4(), pod.v6()) else {
            panic!("a pod has an address in each family");
        };
        Self { v4, v6 }
    }

    /// Returns both addresses, IPv4 first.
    pub(crate) fn ips(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Formats both addresses as the items of a YAML list.
    pub(crate) fn yaml_list(self) -> String {
        format!("\"{}\", \"{}\"", self.v4, self.v6)
    }

    /// Formats both addresses as the items of a load balancer's `ingress` list in YAML.
    pub(crate) fn yaml_ingress(self) -> String {
        format!("{{ip: \"{}\"}}, {{ip: \"{}\"}}", self.v4, self.v6)
    }

    /// Adds both addresses to a network interface in a sandbox.
    pub(crate) fn add_to(self, sandbox: &Sandbox, link: &str) -> Result<()> {
        let Self { v4, v6 } = self;
        sandbox.ip(&format!(
            "addr add {v4}/32 dev {link}\naddr add {v6}/128 dev {link} nodad\n"
        ))
    }

    /// Deletes both addresses from a network interface in a sandbox.
    pub(crate) fn delete_from(self, sandbox: &Sandbox, link: &str) -> Result<()> {
        let Self { v4, v6 } = self;
        sandbox.ip(&format!(
            "addr del {v4}/32 dev {link}\naddr del {v6}/128 dev {link}\n"
        ))
    }

    /// Builds a Service with these ClusterIPs, and with ports for HTTP over TCP and DNS over UDP.
    pub(crate) fn service(self, name: &str) -> Service {
        Service::new(name, self.ips())
            .port(Protocol::TCP, HTTP, HTTP_TARGET)
            .port(Protocol::UDP, DNS, DNS_TARGET)
    }
}

/// The host's addresses.
pub(crate) const HOST: Vip = Vip {
    v4: HOST_V4,
    v6: HOST_V6,
};

/// Starts servers in a pod, on the target ports of [`Vip::service`].
pub(crate) fn serve(pod: &Pod) -> Result<Server> {
    pod.serve(&[
        Listener::new(ServerKind::Http, HTTP_TARGET),
        Listener::new(ServerKind::Udp, DNS_TARGET),
    ])
}

/// Returns the pods' addresses, for use as a Service's backends.
pub(crate) fn addresses(pods: &[&Pod]) -> Vec<IpAddr> {
    let both = |pod: &Pod| [pod.v4(), pod.v6()];
    pods.iter().flat_map(|pod| both(pod)).collect()
}

/// The time limit for a client to be given another backend. The goal is 100 ms; the rest allows for slow or
/// busy machines.
pub(crate) const RECOVERY_LIMIT: Duration = Duration::from_secs(1);

/// A combination of a client socket's address family and that of the address it dials.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Dialer {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
    /// An IPv6 socket that dials a v4-mapped address.
    Mapped,
    /// An IPv6 socket that passes an IPv4 address (`AF_INET`) to the kernel; UDP only.
    V4OnV6,
}

impl Dialer {
    /// The dialers that TCP clients use.
    pub(crate) const TCP: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];
    /// The dialers that UDP clients use.
    pub(crate) const UDP: [Self; 4] = [Self::V4, Self::V6, Self::Mapped, Self::V4OnV6];

    const fn domain(self) -> Domain {
        match self {
            Self::V4 => Domain::IPV4,
            Self::V6 | Self::Mapped | Self::V4OnV6 => Domain::IPV6,
        }
    }

    /// Returns the family of the packets that this dialer sends.
    pub(crate) const fn family(self) -> Family {
        match self {
            Self::V4 | Self::Mapped | Self::V4OnV6 => Family::V4,
            Self::V6 => Family::V6,
        }
    }

    /// Returns a VIP's address in the form that this dialer passes to the kernel.
    pub(crate) fn address(self, vip: Vip, port: u16) -> SocketAddr {
        match self {
            Self::V4 | Self::V4OnV6 => (vip.v4, port).into(),
            Self::V6 => (vip.v6, port).into(),
            Self::Mapped => (vip.v4.to_ipv6_mapped(), port).into(),
        }
    }

    /// Returns the address that the kernel reports as the peer or sender to a client that used this dialer
    /// for a VIP.
    pub(crate) fn reported_address(self, vip: Vip, port: u16) -> SocketAddr {
        match self {
            Self::V4 => (vip.v4, port).into(),
            Self::V6 => (vip.v6, port).into(),
            Self::Mapped | Self::V4OnV6 => (vip.v4.to_ipv6_mapped(), port).into(),
        }
    }

    pub(crate) fn tcp_socket(self, sandbox: &Sandbox) -> io::Result<Socket> {
        let socket = sandbox.socket(self.domain(), Type::STREAM)?;
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(socket)
    }

    /// Connects over TCP.
    pub(crate) fn connect(self, sandbox: &Sandbox, vip: Vip, port: u16) -> io::Result<TcpStream> {
        let socket = self.tcp_socket(sandbox)?;
        connect_within(&socket, self.address(vip, port), RESPONSE_TIMEOUT)?;
        Ok(socket.into())
    }

    /// Connects over TCP, and returns the name of the server that answers.
    pub(crate) fn dial(self, sandbox: &Sandbox, vip: Vip, port: u16) -> Result<String> {
        http_server_name(self.connect(sandbox, vip, port)?)
    }

    /// Connects over TCP. The peer must be the dialled address, and the given server must answer.
    pub(crate) fn expect_served(
        self,
        sandbox: &Sandbox,
        vip: Vip,
        port: u16,
        server: &str,
    ) -> Result<()> {
        let check = || {
            let stream = self.connect(sandbox, vip, port)?;
            ensure_eq(
                "peer",
                stream.peer_addr()?,
                self.reported_address(vip, port),
            )?;
            ensure_eq("server", http_server_name(stream)?, server)
        };
        check().with_context(|| format!("{self:?} to port {port} of {vip:?}"))
    }

    /// Sends a datagram. The given server must reply, and the reply's sender must be the dialled address.
    pub(crate) fn expect_answer(
        self,
        socket: &UdpSocket,
        vip: Vip,
        port: u16,
        server: &str,
    ) -> Result<()> {
        let expected = (server.to_owned(), self.reported_address(vip, port));
        query_to(socket, self.address(vip, port))
            .and_then(|answer| ensure_eq("answer", answer, expected))
            .with_context(|| format!("{self:?} to UDP port {port} of {vip:?}"))
    }

    /// Creates a connected UDP socket.
    pub(crate) fn connect_udp(
        self,
        sandbox: &Sandbox,
        vip: Vip,
        port: u16,
    ) -> io::Result<UdpSocket> {
        let socket = self.udp_socket(sandbox)?;
        socket.connect(self.address(vip, port))?;
        Ok(socket)
    }

    /// Creates a connected UDP socket. The given server must reply on it.
    pub(crate) fn connect_udp_to(
        self,
        sandbox: &Sandbox,
        vip: Vip,
        port: u16,
        server: &str,
    ) -> Result<UdpSocket> {
        let socket = self.connect_udp(sandbox, vip, port)?;
        ensure_eq("server", query(&socket)?, server)?;
        Ok(socket)
    }

    /// Creates a UDP socket that is neither bound to an address nor connected.
    pub(crate) fn udp_socket(self, sandbox: &Sandbox) -> io::Result<UdpSocket> {
        let socket = sandbox.socket(self.domain(), Type::DGRAM)?;
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(socket.into())
    }
}

/// Requests `/` over HTTP, and returns the name of the server that answers.
pub(crate) fn http_server_name(stream: TcpStream) -> Result<String> {
    request(stream, "/").map(|(_, name)| name)
}

/// Sends an HTTP GET request, and returns the status code and the body of the response.
pub(crate) fn http_get(sandbox: &Sandbox, at: SocketAddr, path: &str) -> Result<(u16, String)> {
    request(sandbox.connect(at)?, path)
}

fn request(mut stream: TcpStream, path: &str) -> Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the HTTP response has no blank line after its header")?;
    let code = head
        .split(' ')
        .nth(1)
        .context("the HTTP response has no status code")?;
    Ok((code.parse()?, body.to_owned()))
}

/// Receives a reply, and returns the server's name in it and the sender's address.
pub(crate) fn receive(socket: &UdpSocket) -> Result<(String, SocketAddr)> {
    let mut answer = [0; 256];
    let (length, from) = socket.recv_from(&mut answer)?;
    Ok((server(&answer[..length])?, from))
}

/// Parses the server's name in a reply.
pub(crate) fn server(answer: &[u8]) -> Result<String> {
    let text = str::from_utf8(answer)?;
    let (name, _) = text
        .split_once(' ')
        .with_context(|| format!("no server name in the datagram {text:?}"))?;
    Ok(name.to_owned())
}

/// Sends a datagram on a connected socket, and returns the name of the server that replies.
pub(crate) fn query(socket: &UdpSocket) -> Result<String> {
    socket.send(b"who?")?;
    receive(socket).map(|(name, _)| name)
}

/// Sends a datagram, and returns the name of the server that replies and the sender's address.
pub(crate) fn query_to(socket: &UdpSocket, to: SocketAddr) -> Result<(String, SocketAddr)> {
    socket.send_to(b"who?", to)?;
    receive(socket)
}

/// Returns the errors for connections that a program refuses as unreachable: from connect() on a TCP socket,
/// and from connect() or a send on a UDP socket. Without `bpf_set_retval`, the kernel chooses them.
pub(crate) fn unreachable_errors() -> Result<(Errno, Errno)> {
    Ok(if feature::is_supported(Feature::SetRetval)? {
        (Errno::EHOSTUNREACH, Errno::EHOSTUNREACH)
    } else {
        (Errno::ENETUNREACH, Errno::EPERM)
    })
}

/// Returns true if the error means that there is no route, and thus that no program redirected the
/// connection.
pub(crate) fn is_unreachable(error: Errno) -> bool {
    matches!(error, Errno::EHOSTUNREACH | Errno::ENETUNREACH)
}

/// Asserts that an attempt fails with the given error, and that the reason's counter increases by one.
pub(crate) fn expect_refusal<T>(
    instance: &Instance,
    reason: &str,
    error: Errno,
    attempt: impl FnOnce() -> io::Result<T>,
) -> Result<()> {
    let (failed, increases) = count_during(instance, &[reason], || Ok(errno(attempt())))?;
    ensure_eq("error, counted", (failed, increases), (error, vec![1]))
}

/// Runs `check` for each address family. An error names the family.
pub(crate) fn each_family(check: impl Fn(Family) -> Result<()>) -> Result<()> {
    let labelled = |family: Family| check(family).context(family.label());
    [Family::V4, Family::V6].into_iter().try_for_each(labelled)
}

/// Calls `work` in the mount namespace of a sandbox. The virtual machines have no program that mounts.
pub(crate) fn in_mount_namespace<T: Send>(
    sandbox: &Sandbox,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let namespace = File::open(format!("/proc/{}/ns/mnt", sandbox.pid()))?;
    let there = || {
        // A thread that shares its directories with others can't enter another mount namespace.
        unshare(CloneFlags::CLONE_FS)?;
        setns(namespace, CloneFlags::CLONE_NEWNS)?;
        work()
    };
    thread::scope(|scope| scope.spawn(there).join())
        .map_err(|_panic| anyhow::anyhow!("the thread panicked"))?
}

/// Runs a command, which must succeed. Its words are separated by spaces; quoting is not supported.
pub(crate) fn run(sandbox: &Sandbox, command: &str) -> Result<String> {
    sandbox.run(&command.split(' ').collect::<Vec<_>>())
}

/// Lists the routes with the given protocol number in the routing table `local` of a sandbox, for both
/// address families.
pub(crate) fn local_routes(sandbox: &Sandbox, protocol: u8) -> Result<String> {
    let of = |family: &str| {
        let command = format!("ip {family} route show table local proto {protocol}");
        run(sandbox, &command)
    };
    Ok(of("-4")? + &of("-6")?)
}

/// Returns the error number of a call that must have failed.
pub(crate) fn errno<T>(result: io::Result<T>) -> Errno {
    let error = result.err().and_then(|error| error.raw_os_error());
    Errno::from_raw(error.unwrap_or_default())
}

/// Waits for data on the socket, which must fail because the daemon has terminated the socket.
pub(crate) fn expect_ended(socket: &UdpSocket) -> Result<()> {
    let error = errno(socket.recv(&mut [0; 64]));
    ensure_eq("error", error, Errno::ECONNABORTED)?;
    // The kernel's `udp_abort` wakes the receiver shortly before it disconnects the socket.
    wait::until(CHANGE_TIMEOUT, || socket.peer_addr().is_err())
        .context("the ended socket still has a peer")
}

/// Waits until every port of a Service has been programmed with `count` backends.
pub(crate) fn until_backends(instance: &Instance, name: &str, count: usize) -> Result<()> {
    until_each_has(instance, name, "backends", count)
}

/// Waits until the status lists `count` items of the given kind for every port of a Service.
pub(crate) fn until_each_has(
    instance: &Instance,
    name: &str,
    kind: &str,
    count: usize,
) -> Result<()> {
    let what = format!("{kind} of {name}");
    until_eq(&what, BTreeSet::from([Some(count)]), || {
        let ports = ports(&instance.services()?, name);
        let counts = ports.iter().map(|port| port[kind].as_array().map(Vec::len));
        Ok(counts.collect::<BTreeSet<_>>())
    })
}

/// Waits until a Service is no longer in the daemon's status.
pub(crate) fn until_gone(instance: &Instance, name: &str) -> Result<()> {
    until_eq(name, 0, || Ok(ports(&instance.services()?, name).len()))
}

/// Returns a Service's ports, as listed in the daemon's status.
pub(crate) fn ports(services: &serde_json::Value, name: &str) -> Vec<serde_json::Value> {
    let services = services.as_array().into_iter().flatten();
    services
        .filter(|service| service["name"] == name)
        .filter_map(|service| service["ports"].as_array())
        .flatten()
        .cloned()
        .collect()
}

/// Runs `body`, and returns its result and how much each reason's counter increased.
pub(crate) fn count_during<T>(
    instance: &Instance,
    reasons: &[&str],
    body: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<u64>)> {
    let before = instance.reason_counts(reasons)?;
    let done = body()?;
    let after = instance.reason_counts(reasons)?;
    let increases = after
        .iter()
        .zip(&before)
        .map(|(after, before)| after - before);
    Ok((done, increases.collect()))
}

/// Returns the host and a pod, each with a name for error messages.
pub(crate) fn clients<'a>(host: &'a Sandbox, pod: &'a Pod) -> [(&'static str, &'a Sandbox); 2] {
    [("host", host), ("pod", pod)]
}

/// Returns the name of the directory that the maps are pinned in, followed by `rest`.
pub(crate) fn maps_directory(rest: &str) -> String {
    format!("v{LAYOUT_VERSION}{rest}")
}

/// Asserts that two values are equal; `what` names them in the error.
pub(crate) fn ensure_eq<A: PartialEq<B> + Debug, B: Debug>(
    what: &str,
    seen: A,
    expected: B,
) -> Result<()> {
    ensure!(seen == expected, "{what}: {seen:?}, expected {expected:?}");
    Ok(())
}

/// Waits until a value equals the expected one. The error shows the last value read.
pub(crate) fn until_eq<A: PartialEq<B> + Debug, B: Debug>(
    what: &str,
    expected: B,
    mut read: impl FnMut() -> Result<A>,
) -> Result<()> {
    let mut last = None;
    wait::until(CHANGE_TIMEOUT, || {
        let seen = last.insert(read());
        seen.as_ref().is_ok_and(|seen| *seen == expected)
    })
    .with_context(|| format!("{what}: {last:?}, expected {expected:?}"))
}
