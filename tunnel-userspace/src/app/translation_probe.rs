//! Makes test connections at startup: the daemon dials a frontend of its own, to verify that the attached
//! programs translate connections through the maps.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
};

use socket2::{Domain, Socket, Type};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::FrontendKey,
    steering::SteeringKey,
};

use crate::{plan::BackendTarget, reconcile::ProbeFrontend};

/// The IPv4 dummy address (RFC 7600 section 4.8), which is never assigned to a host.
const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
/// The discard port. Connecting a UDP socket sends no packet.
const PORT: u16 = 9;

/// The error returned if the test connection to the daemon's own frontend fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProbeError {
    /// A system call for the test connection failed.
    #[error("cannot connect to 192.0.0.8:9, the frontend of the probe")]
    Connect(#[source] io::Error),
    /// The programs did not translate the connect().
    #[error(
        "the programs on cgroup {cgroup} did not translate a connect of this process: \
         it must run inside that cgroup, but it runs in {own}"
    )]
    OutsideCgroup {
        /// The cgroup that the programs are attached to.
        cgroup: PathBuf,
        /// This process's cgroup, as listed in `/proc/self/cgroup`.
        own: String,
    },
    /// The connect() was translated, but getpeername() does not return the dialled address.
    #[error("the peer of the probe's socket must be 192.0.0.8:9, but getpeername returns {peer}")]
    NotRestored {
        /// The peer address that the kernel returned.
        peer: SocketAddr,
    },
}

/// Returns the probe's frontend: the dummy address, which is translated to loopback.
pub(super) fn frontend() -> ProbeFrontend {
    let (vip, port) = (Address::from_ip(IpAddr::V4(VIP)), Port::from_host(PORT));
    ProbeFrontend {
        frontend: FrontendKey::new(vip, port, Protocol::UDP),
        target: BackendTarget {
            address: Address::from_ip(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            port,
        },
    }
}

/// Connects to the probe's frontend, and checks that the programs translated the connect().
pub(super) fn connect_service(cgroup: &Path) -> Result<(), ProbeError> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(ProbeError::Connect)?;
    let vip = SocketAddr::from((VIP, PORT));
    let connected = socket.connect(vip);
    let own = socket.local_addr().map_err(ProbeError::Connect)?;
    // The source address is a loopback address only if the connect() was translated. Otherwise, it is another
    // address, or there is no route.
    if !own.ip().is_loopback() {
        connected
            .or_else(ignore_no_route)
            .map_err(ProbeError::Connect)?;
        return Err(ProbeError::OutsideCgroup {
            cgroup: cgroup.to_owned(),
            own: own_cgroup(),
        });
    }
    let peer = socket.peer_addr().map_err(ProbeError::Connect)?;
    if peer == vip {
        Ok(())
    } else {
        Err(ProbeError::NotRestored { peer })
    }
}

/// Returns the address and port that the daemon dials so that the programs learn the host's network
/// namespace.
pub(super) fn steering_key() -> SteeringKey {
    SteeringKey::new(Address::from_ip(IpAddr::V4(VIP)), Port::from_host(PORT))
}

/// The socket that connects to [`steering_key`]. The programs know it by its cookie.
pub(super) struct SteeringProbe(Socket);

impl SteeringProbe {
    /// Creates the socket, with the mark of Culvert's own sockets.
    pub(super) fn new(mark: u32) -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_mark(mark)?;
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Returns the socket's cookie, a number that the kernel never gives to any other socket.
    pub(super) fn cookie(&self) -> io::Result<u64> {
        self.0.cookie()
    }

    /// Connects to [`steering_key`]. Returns true if the programs refused the connect(), as they must, so that
    /// no packet was sent.
    pub(super) fn connect(&self) -> bool {
        let connected = self.0.connect(&SocketAddr::from((VIP, PORT)).into());
        matches!(connected, Err(error) if error.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// Returns this process's v2 cgroup, as listed in `/proc/self/cgroup`.
fn own_cgroup() -> String {
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    own.unwrap_or("none").to_owned()
}

/// Ignores an error if it only means that there is no route.
fn ignore_no_route(error: io::Error) -> io::Result<()> {
    let is_no_route = matches!(
        error.kind(),
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable
    );
    if is_no_route { Ok(()) } else { Err(error) }
}
