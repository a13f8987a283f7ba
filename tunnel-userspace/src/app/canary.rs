//! The probe: a connect of the daemon through a frontend of its own. It proves the complete path, from
//! the cgroup to the maps and back.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
};

use socket2::{Domain, Socket, Type};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::FrontKey,
    steering::SteeringKey,
};

use crate::{plan::Target, reconcile::Canary};

/// The IPv4 dummy address (RFC 7600 section 4.8): no host has it, no packet is sent to it.
const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
/// The discard port; a UDP connect sends nothing.
const PORT: u16 = 9;

/// The probe connect failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CanaryError {
    /// The connect failed.
    #[error("cannot connect a socket of this process to a front of its own")]
    Connect(#[source] io::Error),
    /// The programs did not run for the connect.
    #[error(
        "the programs on cgroup {cgroup} did not see a connect of this process: \
         it must run inside that cgroup, and it runs in {own}"
    )]
    Outside {
        /// The cgroup of the programs.
        cgroup: PathBuf,
        /// The cgroup of this process, as the kernel names it.
        own: String,
    },
    /// The connect was translated, but the peer address was not restored.
    #[error("a socket that is connected through a front shows its backend {shown} as peer")]
    NotRestored {
        /// The peer that the kernel returned.
        shown: SocketAddr,
    },
}

/// Returns the probe's frontend: from the dummy address to loopback.
pub(super) fn front() -> Canary {
    let (vip, port) = (Address::from_ip(IpAddr::V4(VIP)), Port::from_host(PORT));
    Canary {
        front: FrontKey::new(vip, port, Protocol::UDP),
        target: Target {
            address: Address::from_ip(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            port,
        },
    }
}

/// Connects through the probe's frontend.
pub(super) fn connect(cgroup: &Path) -> Result<(), CanaryError> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(CanaryError::Connect)?;
    let dialled = SocketAddr::from((VIP, PORT));
    let connected = socket.connect(dialled);
    let own = socket.local_addr().map_err(CanaryError::Connect)?;
    // Only a translated connect has a loopback source. Untranslated, the connect gets another source, or
    // no route.
    if !own.ip().is_loopback() {
        connected.or_else(no_route).map_err(CanaryError::Connect)?;
        return Err(CanaryError::Outside {
            cgroup: cgroup.to_owned(),
            own: own_cgroup(),
        });
    }
    let shown = socket.peer_addr().map_err(CanaryError::Connect)?;
    if shown == dialled {
        Ok(())
    } else {
        Err(CanaryError::NotRestored { shown })
    }
}

/// Returns the destination that shows the programs the network namespace of this process.
pub(super) fn steering_key() -> SteeringKey {
    SteeringKey::new(Address::from_ip(IpAddr::V4(VIP)), Port::from_host(PORT))
}

/// Connects to that destination, with the mark of Culvert's own sockets; the programs let no packet
/// leave.
pub(super) fn probe(mark: u32) {
    let probed = Socket::new(Domain::IPV4, Type::STREAM, None).and_then(|socket| {
        socket.set_mark(mark)?;
        socket.set_nonblocking(true)?;
        socket.connect(&SocketAddr::from((VIP, PORT)).into())
    });
    tracing::debug!(?probed, "the steering canary was sent");
}

/// Returns the v2 cgroup of this process, in the kernel's notation.
fn own_cgroup() -> String {
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    own.unwrap_or("none").to_owned()
}

fn no_route(error: io::Error) -> io::Result<()> {
    let is_no_route = matches!(
        error.kind(),
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable
    );
    if is_no_route { Ok(()) } else { Err(error) }
}
