//! Outsiders can't reach the ingress, even without a daemon; a cleanup removes the guard and the routes.

use std::{
    io::{self, ErrorKind, Read as _},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    place::{ANSWER, Place, connect_within},
    site::{KUBELET, Site},
    wait,
};

use super::{both, expect_unsteered};
use crate::{
    cleanup::cleanup,
    support::{CHANGE, HOST, counted, local_routes, run, same},
};

/// The port of the ingress.
const INGRESS: u16 = 10_270;

/// The timeout of a connect from outside, whose packets should be dropped.
const LOST: Duration = Duration::from_millis(300);

/// Returns the IPv4 and the IPv6 steering address with this index, with the port of the ingress.
fn steering(number: u8) -> [SocketAddr; 2] {
    let v4 = Ipv4Addr::new(198, 19, 0, number);
    let v6 = Ipv6Addr::new(0xfd00, 0xc01e, 0, 0, 0, 0, 0, number.into());
    [(v4, INGRESS).into(), (v6, INGRESS).into()]
}

fn connect(place: &Place, to: SocketAddr, within: Duration) -> io::Result<std::net::TcpStream> {
    let socket = place.socket(Domain::for_address(to), Type::STREAM)?;
    connect_within(&socket, to, within)?;
    socket.set_read_timeout(Some(ANSWER))?;
    Ok(socket.into())
}

#[test]
fn outsiders_do_not_reach_the_ingress() -> Result<()> {
    let site = Site::new()?;
    let (node, outside) = (site.node(), site.node().outside());
    let before = site.kubelet().record()?.exchanges.len();

    for to in (1..=4).flat_map(steering) {
        let knock = || Ok(connect(outside, to, LOST).map(drop).map_err(|it| it.kind()));
        let (outcome, grown) = counted(node, &["guard_dropped"], knock)?;
        ensure!(outcome == Err(ErrorKind::TimedOut), "{to}: {outcome:?}");
        ensure!(grown[0] > 0, "{to}: the dropped packet isn't counted");
    }
    for address in HOST.ips() {
        let to = SocketAddr::new(address, INGRESS);
        match connect(outside, to, ANSWER).map_err(|it| it.kind()) {
            // The ingress may reset the connection before the connect returns.
            Err(ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) => {}
            Err(other) => bail!("{to}: {other}"),
            Ok(mut stream) => {
                let outcome = stream.read(&mut [0]).map_err(|it| it.kind());
                same("outcome", outcome, Err(ErrorKind::ConnectionReset))?;
            }
        }
    }
    for to in both(KUBELET[0]) {
        expect_unsteered(outside, to)?;
    }
    let after = site.kubelet().record()?.exchanges.len();
    same("connections", after, before)?;
    site.ask(node.host())
}

#[test]
fn the_guard_and_the_routes_stay_with_a_dead_daemon_and_go_with_cleanup() -> Result<()> {
    let site = Site::new()?;
    let node = site.node();
    let (host, outside) = (node.host(), node.outside());
    same("routes", local_routes(host, 176)?.lines().count(), 2)?;
    // The guard also drops packets from outside if another process listens on the port.
    node.kill9()?;
    let listener = host.listen(("0.0.0.0", INGRESS))?;
    let [to, _] = steering(1);
    let outcome = connect(outside, to, LOST).map(drop).map_err(|it| it.kind());
    same("outcome", outcome, Err(ErrorKind::TimedOut))?;
    drop(listener);

    cleanup(node)?;

    same("routes", local_routes(host, 176)?, "")?;
    ensure!(!node.bpffs().exists());
    let [v4, v6] = both(KUBELET[0]);
    wait::until(CHANGE, || expect_unsteered(host, v4).is_ok()).context("still steered")?;
    expect_unsteered(&*site.pod()?, v6)?;
    // The kernel detaches the guard a moment after its pin is removed; then outsiders reach the prefix.
    host.ip("route add local 198.19.0.0/16 dev lo\n")?;
    let listener = host.listen(("0.0.0.0", INGRESS))?;
    wait::until(CHANGE, || connect(outside, to, LOST).is_ok()).context("still guarded")?;

    run(host, "ip route del local 198.19.0.0/16 dev lo")?;
    drop(listener);
    node.start()?;
    site.until_served()
}
