//! Tests connections from the cloud to a kubelet on an edge node, through steering and the tunnel.

use std::{io, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use socket2::{Domain, Socket, Type};
use tunnel_tests::{
    clock::Instant,
    fake_kubelet::client::Client,
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use crate::support::{HOST, Vip, errno, is_unreachable};

mod faults;
mod forwarded;
mod object_changes;
mod outsiders;
mod replaced_maps;
mod revoked_access;
mod steering;

/// The time limit for a refusal.
const AT_ONCE: Duration = Duration::from_millis(100);

/// The cloud node's host or one of its pods, with its own addresses.
struct ClientSandbox<'a> {
    sandbox: &'a Sandbox,
    own: Vip,
    is_pod: bool,
}

/// A kind of client socket for connections to the kubelet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum SocketKind {
    Plain,
    /// Bound to an address of the client's host or pod.
    Bound,
    NonBlocking,
    /// IPv6, with a v4-mapped destination.
    Mapped,
    /// Bound to a network interface of the client's host or pod.
    Device,
}

impl SocketKind {
    const ALL: [Self; 5] = [
        Self::Plain,
        Self::Bound,
        Self::NonBlocking,
        Self::Mapped,
        Self::Device,
    ];

    /// Returns an address in the form that a socket of this kind passes to the kernel.
    fn dialled(self, to: SocketAddr) -> SocketAddr {
        match (self, to) {
            (Self::Mapped, SocketAddr::V4(v4)) => (v4.ip().to_ipv6_mapped(), v4.port()).into(),
            _ => to,
        }
    }

    fn connect(self, from: &ClientSandbox<'_>, to: SocketAddr) -> io::Result<Socket> {
        let to = self.dialled(to);
        let socket = from.sandbox.socket(Domain::for_address(to), Type::STREAM)?;
        match self {
            Self::Plain | Self::Mapped => {}
            Self::Bound => {
                let own = from.own.ips()[usize::from(to.is_ipv6())];
                socket.bind(&SocketAddr::from((own, 0)).into())?;
            }
            Self::Device => {
                let device = if from.is_pod { "eth0" } else { "uplink" };
                socket.bind_device(Some(device.as_bytes()))?;
            }
            Self::NonBlocking => {
                socket.set_nonblocking(true)?;
                match socket.connect(&to.into()) {
                    Err(error) if error.raw_os_error() != Some(nix::libc::EINPROGRESS) => {
                        return Err(error);
                    }
                    Ok(()) | Err(_) => {}
                }
                // `take_error` returns `None` while the connection is still being established, too, but then
                // the socket has no peer.
                let end = || match socket.take_error() {
                    Ok(None) => socket.peer_addr().ok().map(|_| Ok(())),
                    Ok(Some(error)) | Err(error) => Some(Err(error)),
                };
                wait::until_some(RESPONSE_TIMEOUT, end).map_err(io::Error::other)??;
                socket.set_nonblocking(false)?;
                return Ok(socket);
            }
        }
        connect_within(&socket, to, RESPONSE_TIMEOUT)?;
        Ok(socket)
    }
}

/// Runs `check` for the host and for a pod.
fn for_each_client(
    testbed: &TunnelTestbed,
    check: impl Fn(&ClientSandbox<'_>) -> Result<()>,
) -> Result<()> {
    let pod = testbed.pod()?;
    let host = testbed.node().host();
    for (name, sandbox, own, is_pod) in [
        ("host", host, HOST, false),
        ("pod", &**pod, Vip::of_pod(&pod), true),
    ] {
        check(&ClientSandbox {
            sandbox,
            own,
            is_pod,
        })
        .context(name)?;
    }
    Ok(())
}

/// Returns the edge node's IPv4 and IPv6 addresses with this port.
const fn edge_addresses(port: u16) -> [SocketAddr; 2] {
    [TunnelTestbed::addr_v4(port), TunnelTestbed::addr_v6(port)]
}

/// Connects a plain socket to the kubelet, and creates a kubelet client that uses it.
fn client(testbed: &TunnelTestbed, sandbox: &Sandbox, to: SocketAddr) -> Result<Client> {
    testbed.client(sandbox.connect(to)?, to)
}

/// Waits until the kubelet is reachable, then makes a request from the host and from a pod over both address
/// families.
fn expect_served(testbed: &TunnelTestbed) -> Result<()> {
    testbed.wait_for_kubelet()?;
    for_each_client(testbed, |from| {
        for to in edge_addresses(KUBELET_PORTS[0]) {
            client(testbed, from.sandbox, to)?.healthz()?;
        }
        Ok(())
    })
}

/// Asserts that a connection from a plain socket is not steered.
fn expect_unsteered(sandbox: &Sandbox, to: SocketAddr) -> Result<()> {
    let error = errno(sandbox.connect(to));
    ensure!(is_unreachable(error), "{to}: {error:?}");
    Ok(())
}

/// Asserts that a connection from a plain socket is refused at once.
fn expect_refused(sandbox: &Sandbox, to: SocketAddr) -> Result<()> {
    let start = Instant::now();
    let error = errno(sandbox.connect(to));
    ensure!(error == Errno::ECONNREFUSED, "{to}: {error:?}");
    let after = start.elapsed();
    ensure!(after < AT_ONCE, "{to}: refused after {after:?}");
    Ok(())
}
