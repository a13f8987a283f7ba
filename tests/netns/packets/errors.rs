//! ICMP errors about packets of a Service: both ends find the size that the path allows, and each sees only the addresses
//! that it knows.

use std::{
    io::{ErrorKind, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    errno::Errno,
    sys::socket::{
        ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt,
        sockopt::{Ipv4RecvErr, Ipv6RecvErr},
    },
};
use tunnel_tests::{sandbox::Sandbox, wait};

use super::{
    ADDRESSES, Backend, REMOTE, exchange_stream, pod_elsewhere, redirect::expect_delivery, remote,
    route_to_node, service,
};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, Dialer, Vip, ensure_eq, run},
};

/// The client, behind the router outside.
pub(super) const CLIENT: Vip = Vip {
    v4: Ipv4Addr::new(203, 0, 113, 18),
    v6: Ipv6Addr::new(0x2001, 0xdb8, 0x113, 1, 0, 0, 0, 2),
};

/// The largest packet on the narrow link: the minimum of IPv6.
const NARROW: u32 = 1280;
/// The size of datagrams that fit into the other links only.
const LARGE: usize = 1400;

/// The place of the backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    ThisNode,
    OtherNode,
}

/// A client behind a router, a node with a Service, and the backend.
pub(super) struct Path {
    pub(super) scene: Scene,
    pub(super) client: Sandbox,
    /// The backend's sandbox, if it is on another node.
    _remote: Option<Sandbox>,
    backend: Option<Backend>,
    backend_at: Vip,
    place: Place,
}

/// The places of the backend, each with the values of `service.packets.delivery`.
fn cases() -> impl Iterator<Item = (Place, &'static str)> {
    let places = [Place::ThisNode, Place::OtherNode].into_iter();
    places.flat_map(|place| ["stack", "redirect"].map(|delivery| (place, delivery)))
}

impl Path {
    pub(super) fn new(place: Place) -> Result<Self> {
        Self::with_delivery((place, "stack"))
    }

    fn with_delivery((place, delivery): (Place, &str)) -> Result<Self> {
        let scene = configured(&format!("packets: {{ delivery: {delivery} }}"))?;
        route_to_node(&scene)?;
        let client = pod_elsewhere(&scene, "client", CLIENT)?;
        let (remote, backend_at, backend) = match place {
            Place::OtherNode => {
                let remote = remote(&scene)?;
                let backend = Backend::at(&remote, REMOTE.ips())?;
                (Some(remote), REMOTE, backend)
            }
            Place::ThisNode => {
                let pod = scene.node.pod("origin")?;
                let at = Vip::of_pod(&pod);
                (None, at, Backend::at(&pod, at.ips())?)
            }
        };
        scene.node.start()?;
        scene.program(service("Cluster").backends(backend_at.ips()))?;
        Ok(Self {
            scene,
            client,
            _remote: remote,
            backend: Some(backend),
            backend_at,
            place,
        })
    }

    pub(super) fn backend(&self) -> Result<&Backend> {
        self.backend.as_ref().context("the backend has no sockets")
    }

    /// Makes the link to the client, or the one to the backend, narrow.
    fn narrow(&self, towards_client: bool) -> Result<()> {
        let outside = self.scene.node.outside();
        let (router, link, Vip { v4, v6 }) = if towards_client {
            (outside, "client".to_owned(), CLIENT)
        } else if self.place == Place::OtherNode {
            (outside, "remote".to_owned(), REMOTE)
        } else {
            let host = self.scene.node.host();
            (host, super::link_to(self.backend_at), self.backend_at)
        };
        let to = |ip: String| format!("{ip} dev {link} mtu {NARROW}");
        run(
            router,
            &format!("ip route replace {}", to(format!("{v4}/32"))),
        )?;
        run(
            router,
            &format!("ip -6 route replace {}", to(format!("{v6}/128"))),
        )?;
        Ok(())
    }
}

/// Sends a datagram of this size on one socket until the other one receives it. Returns the sender that it saw, and how many
/// datagrams were lost before.
pub(super) fn send_until_received(
    from: &UdpSocket,
    to: SocketAddr,
    receiver: &UdpSocket,
    size: usize,
) -> Result<(SocketAddr, u32)> {
    let mut received = vec![0; size + 1];
    receiver.set_read_timeout(Some(Duration::from_secs(1)))?;
    for lost in 0..5 {
        let data = vec![lost; size];
        match from.send_to(&data, to) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(Errno::EMSGSIZE as i32) => {}
            Err(error) => return Err(error.into()),
        }
        while let Ok((length, sender)) = receiver.recv_from(&mut received) {
            ensure!(length == size, "another size: {length} bytes");
            // One that was sent earlier may be late.
            if received[..length] == data {
                return Ok((sender, lost.into()));
            }
        }
    }
    bail!("no datagram from {from:?} to {to}")
}

/// Exchanges large packets over both protocols, in both families, through the node port and the load balancer's address.
fn expect_large_packets(path: &Path) -> Result<()> {
    let [_, node_port, balancer, _] = ADDRESSES;
    for (what, vip, [http, dns]) in [node_port, balancer] {
        for (index, dialer) in [Dialer::V4, Dialer::V6].into_iter().enumerate() {
            let udp = || {
                let socket = dialer.udp_socket(&path.client)?;
                let to = dialer.address(vip, dns);
                let backend = &path.backend()?.udp[index];
                // The first datagram is lost, and its sender learns what size the path allows.
                let (seen, _) =
                    send_until_received(&socket, to, backend, LARGE).context("the request")?;
                let (sender, _) =
                    send_until_received(backend, seen, &socket, LARGE).context("the reply")?;
                ensure_eq("the sender of the reply", sender, to)
            };
            udp().with_context(|| format!("UDP, {what}, {dialer:?}"))?;
            let tcp = || {
                let stream = dialer.connect(&path.client, vip, http)?;
                let (accepted, _) = path.backend()?.tcp[index].accept()?;
                exchange_stream(&stream, &accepted)
            };
            tcp().with_context(|| format!("TCP, {what}, {dialer:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn both_ends_find_the_size_that_a_narrow_link_allows() -> Result<()> {
    for case in cases() {
        for towards_client in [true, false] {
            let path = Path::with_delivery(case)?;
            path.narrow(towards_client)?;
            expect_large_packets(&path)
                .with_context(|| format!("{case:?}, towards the client: {towards_client}"))?;
            let translated = path.scene.node.reason_count("icmp_error_translated")?;
            ensure!(translated > 0, "no error about {case:?}");
            // Packets to a pod of this node take the stack in any case.
            if case.0 == Place::OtherNode {
                for index in [0, 1] {
                    expect_delivery((&path.scene, &path.client), path.backend()?, index, case.1)?;
                }
            }
        }
    }
    Ok(())
}

/// A datagram socket that receives errors in full.
struct ErrorSocket(UdpSocket);

impl ErrorSocket {
    fn new(sandbox: &Sandbox, dialer: Dialer, to: SocketAddr) -> Result<Self> {
        let socket = dialer.udp_socket(sandbox)?;
        if to.is_ipv4() {
            setsockopt(&socket, Ipv4RecvErr, &true)?;
        } else {
            setsockopt(&socket, Ipv6RecvErr, &true)?;
        }
        socket.connect(to)?;
        Ok(Self(socket))
    }

    /// Sends a datagram, and returns the error about it, the address that the error came from, and the destination of the
    /// datagram.
    fn error_about(&self, data: &[u8]) -> Result<(Errno, IpAddr, SocketAddr)> {
        let mut found = None;
        self.0.send(data)?;
        wait::until(CHANGE_TIMEOUT, || {
            found = self.read_error().ok();
            // The kernel limits the rate of errors on the whole machine, except those about the size.
            if found.is_none() && data.len() < LARGE {
                drop(self.0.send(data));
            }
            found.is_some()
        })
        .context("no error")?;
        found.context("no error")
    }

    fn read_error(&self) -> Result<(Errno, IpAddr, SocketAddr)> {
        let mut data = [0; 2048];
        let mut control = nix::cmsg_space!([u8; 128]);
        let mut buffers = [IoSliceMut::new(&mut data)];
        let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
        let message = recvmsg::<SockaddrStorage>(
            self.0.as_raw_fd(),
            &mut buffers,
            Some(&mut control),
            flags,
        )?;
        let to = message.address.context("no destination")?;
        let to = match (to.as_sockaddr_in(), to.as_sockaddr_in6()) {
            (Some(v4), _) => SocketAddr::new(v4.ip().into(), v4.port()),
            (None, Some(v6)) => SocketAddr::new(v6.ip().into(), v6.port()),
            (None, None) => bail!("an address of another family"),
        };
        for control in message.cmsgs()? {
            let (error, from) = if let ControlMessageOwned::Ipv4RecvErr(error, Some(from)) = control
            {
                let ip = Ipv4Addr::from_bits(u32::from_be(from.sin_addr.s_addr));
                (error, IpAddr::V4(ip))
            } else if let ControlMessageOwned::Ipv6RecvErr(error, Some(from)) = control {
                (error, IpAddr::from(from.sin6_addr.s6_addr))
            } else {
                continue;
            };
            let errno = Errno::from_raw(i32::try_from(error.ee_errno)?);
            return Ok((errno, from, to));
        }
        bail!("no error in the message")
    }
}

/// Sends a datagram that causes an error, and asserts that the client sees only the address that it has dialled.
fn expect_error(client: &Sandbox, dialer: Dialer, cause: Cause) -> Result<()> {
    let (_, vip, [_, dns]) = ADDRESSES[1];
    let to = dialer.address(vip, dns);
    let socket = ErrorSocket::new(client, dialer, to)?;
    if cause == Cause::Ttl {
        // The router outside passes it on, and the node doesn't.
        let raw = socket2::SockRef::from(&socket.0);
        if to.is_ipv4() {
            raw.set_ttl_v4(2)?;
        } else {
            raw.set_unicast_hops_v6(2)?;
        }
    }
    let (data, expected): (&[u8], _) = match cause {
        Cause::NoSocket => (b"ask", Errno::ECONNREFUSED),
        Cause::Ttl => (b"ask", Errno::EHOSTUNREACH),
        Cause::Size => (&[7; LARGE], Errno::EMSGSIZE),
    };
    let (error, from, about) = socket.error_about(data)?;
    ensure_eq("the error", error, expected)?;
    ensure_eq("its sender", from, to.ip())?;
    ensure_eq("the destination of the datagram", about, to)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Cause {
    /// The backend has no socket for the datagram.
    NoSocket,
    /// The datagram has passed too many routers.
    Ttl,
    /// The datagram is too large for the link to the backend.
    Size,
}

#[test]
fn a_client_sees_only_the_address_that_it_has_dialled_in_errors() -> Result<()> {
    for case in cases() {
        let mut path = Path::with_delivery(case)?;
        path.narrow(false)?;
        for cause in [Cause::Ttl, Cause::Size, Cause::NoSocket] {
            if cause == Cause::NoSocket {
                path.backend.take();
            }
            for dialer in [Dialer::V4, Dialer::V6] {
                expect_error(&path.client, dialer, cause)
                    .with_context(|| format!("{case:?}, {cause:?}, {dialer:?}"))?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_backend_learns_that_its_client_has_gone() -> Result<()> {
    let (_, vip, [_, dns]) = ADDRESSES[1];
    for place in [Place::ThisNode, Place::OtherNode] {
        let path = Path::new(place)?;
        for (index, dialer) in [Dialer::V4, Dialer::V6].into_iter().enumerate() {
            let check = || {
                let client = dialer.udp_socket(&path.client)?;
                client.send_to(b"ask", dialer.address(vip, dns))?;
                let backend = &path.backend()?.udp[index];
                let (_, seen) = backend.recv_from(&mut [0; 16])?;
                drop(client);
                let backend = backend.try_clone()?;
                backend.connect(seen)?;
                backend.set_read_timeout(Some(Duration::from_millis(100)))?;
                // The kernel limits the rate of errors on the whole machine.
                let is_refused = || {
                    let answered = backend.send(b"answer");
                    let error = answered.and_then(|_| backend.recv(&mut [0; 16])).err();
                    error.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
                };
                wait::until(CHANGE_TIMEOUT, is_refused).context("no error")
            };
            check().with_context(|| format!("{place:?}, {dialer:?}"))?;
        }
    }
    Ok(())
}
