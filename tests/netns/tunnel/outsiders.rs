//! Tests that outsiders can't reach the ingress, even while no daemon is running, and that cleanup removes
//! the guard and the routes.

use std::{
    io::{self, ErrorKind, Read as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use super::{edge_addresses, expect_unsteered};
use crate::{
    cleanup::cleanup,
    support::{CHANGE_TIMEOUT, HOST, count_during, ensure_eq, local_routes, run},
};

/// The port that the ingress listens on.
const INGRESS: u16 = 10_270;

/// The timeout for connections from outside whose packets should be dropped.
const DROP_TIMEOUT: Duration = Duration::from_millis(300);

/// Returns the IPv4 and IPv6 steering addresses with the given index, each with the ingress's port.
fn steering_addresses(number: u8) -> [SocketAddr; 2] {
    let v4 = Ipv4Addr::new(198, 19, 0, number);
    let v6 = Ipv6Addr::new(0xfd00, 0xc01e, 0, 0, 0, 0, 0, number.into());
    [(v4, INGRESS).into(), (v6, INGRESS).into()]
}

fn connect(sandbox: &Sandbox, to: SocketAddr, within: Duration) -> io::Result<std::net::TcpStream> {
    let socket = sandbox.socket(Domain::for_address(to), Type::STREAM)?;
    connect_within(&socket, to, within)?;
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    Ok(socket.into())
}

#[test]
fn outsiders_do_not_reach_the_ingress() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (node, outside) = (testbed.node(), testbed.node().outside());
    let before = testbed.kubelet().record()?.exchanges.len();

    for to in (1..=4).flat_map(steering_addresses) {
        let dial = || {
            Ok(connect(outside, to, DROP_TIMEOUT)
                .map(drop)
                .map_err(|it| it.kind()))
        };
        let (result, increases) = count_during(node, &["guard_dropped"], dial)?;
        ensure!(result == Err(ErrorKind::TimedOut), "{to}: {result:?}");
        ensure!(increases[0] > 0, "{to}: the dropped packet isn't counted");
    }
    for address in HOST.ips() {
        let to = SocketAddr::new(address, INGRESS);
        match connect(outside, to, RESPONSE_TIMEOUT).map_err(|it| it.kind()) {
            // The ingress may reset the connection before connect() returns.
            Err(ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) => {}
            Err(other) => bail!("{to}: {other}"),
            Ok(mut stream) => {
                let result = stream.read(&mut [0]).map_err(|it| it.kind());
                ensure_eq(
                    "result of the connect",
                    result,
                    Err(ErrorKind::ConnectionReset),
                )?;
            }
        }
    }
    for to in edge_addresses(KUBELET_PORTS[0]) {
        expect_unsteered(outside, to)?;
    }
    let after = testbed.kubelet().record()?.exchanges.len();
    ensure_eq("connections", after, before)?;
    testbed.request_healthz(node.host())
}

#[test]
fn the_guard_and_the_routes_outlive_a_killed_daemon_until_cleanup() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let (host, outside) = (node.host(), node.outside());
    ensure_eq("routes", local_routes(host, 176)?.lines().count(), 2)?;
    // The guard drops packets from outside even if another process listens on the ingress's port.
    node.kill9()?;
    let listener = host.listen(("0.0.0.0", INGRESS))?;
    let [to, _] = steering_addresses(1);
    let result = connect(outside, to, DROP_TIMEOUT)
        .map(drop)
        .map_err(|it| it.kind());
    ensure_eq("result of the connect", result, Err(ErrorKind::TimedOut))?;
    drop(listener);

    cleanup(node)?;

    ensure_eq("routes", local_routes(host, 176)?, "")?;
    ensure!(!node.bpffs().exists());
    let [v4, v6] = edge_addresses(KUBELET_PORTS[0]);
    wait::until(CHANGE_TIMEOUT, || expect_unsteered(host, v4).is_ok())
        .context("connects are still steered")?;
    expect_unsteered(&*testbed.pod()?, v6)?;
    // The kernel detaches the guard shortly after its pin is removed. From then on, outsiders can reach the
    // prefix.
    host.ip("route add local 198.19.0.0/16 dev lo\n")?;
    let listener = host.listen(("0.0.0.0", INGRESS))?;
    wait::until(CHANGE_TIMEOUT, || {
        connect(outside, to, DROP_TIMEOUT).is_ok()
    })
    .context("packets from outside are still dropped")?;

    run(host, "ip route del local 198.19.0.0/16 dev lo")?;
    drop(listener);
    node.start()?;
    testbed.wait_for_kubelet()
}
