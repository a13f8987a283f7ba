//! Nobody outside gets in, and cleanup takes everything away.

use std::{
    io::{self, Read as _},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    place::{ANSWER, Place, connect_within},
    site::{KUBELET, Site},
    topology::{HOST_V4, HOST_V6},
    wait,
};

use super::{both, expect_unsteered};
use crate::support::{CHANGE, counted, same};

/// The first addresses of the steering prefixes, which stand for ports of the edge.
const STEERING: [&str; 2] = ["198.19.0", "fd00:c01e:"];

/// The port of the ingress.
const INGRESS: u16 = 10_270;

/// How long a packet may take from outside, if it comes at all.
const LOST: Duration = Duration::from_millis(300);

fn steering(family: usize, number: u16) -> Result<SocketAddr> {
    let address: IpAddr = if family == 0 {
        format!("{}.{number}", STEERING[0]).parse()?
    } else {
        format!("{}:{number:x}", STEERING[1]).parse()?
    };
    Ok(SocketAddr::new(address, INGRESS))
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

    for family in [0, 1] {
        for number in 1..=4 {
            let to = steering(family, number)?;
            let knock = || Ok(connect(outside, to, LOST).map(drop).map_err(|it| it.kind()));
            let (outcome, grown) = counted(node, &["guarded"], knock)?;
            ensure!(outcome == Err(io::ErrorKind::TimedOut), "{to}: {outcome:?}");
            ensure!(grown[0] > 0, "{to}: not counted as guarded");
        }
    }
    for address in [IpAddr::from(HOST_V4), IpAddr::from(HOST_V6)] {
        let to = SocketAddr::new(address, INGRESS);
        match connect(outside, to, ANSWER) {
            // The reset of the ingress may be here before the connect is back.
            Err(error) => ensure!(
                [
                    io::ErrorKind::ConnectionRefused,
                    io::ErrorKind::ConnectionReset
                ]
                .contains(&error.kind()),
                "{to}: {error}"
            ),
            Ok(mut stream) => {
                let outcome = stream.read(&mut [0]).map_err(|it| it.kind());
                same("outcome", outcome, Err(io::ErrorKind::ConnectionReset))?;
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

/// The routes of the product in a place.
fn routes(place: &Place) -> Result<String> {
    let mut found = String::new();
    for family in ["-4", "-6"] {
        found += &place.run(&[
            "ip", family, "route", "show", "table", "local", "proto", "176",
        ])?;
    }
    Ok(found)
}

#[test]
fn the_guard_and_the_routes_stay_with_a_dead_daemon_and_go_with_cleanup() -> Result<()> {
    let site = Site::new()?;
    let (node, outside) = (site.node(), site.node().outside());
    same("routes", routes(node.host())?.lines().count(), 2)?;
    // Whoever listens there: nothing comes from outside while the guard is up.
    node.kill9()?;
    let listener = node.host().listen(("0.0.0.0", INGRESS))?;
    let to = steering(0, 1)?;
    let outcome = connect(outside, to, LOST).map(drop).map_err(|it| it.kind());
    same("outcome", outcome, Err(io::ErrorKind::TimedOut))?;
    drop(listener);

    let output = node.culvert(&["cleanup"])?;
    ensure!(output.exit.is_success(), "{output:?}");

    same("routes", routes(node.host())?, "")?;
    ensure!(!node.bpffs().exists());
    wait::until(CHANGE, || {
        expect_unsteered(node.host(), both(KUBELET[0])[0]).is_ok()
    })
    .context("still steered")?;
    expect_unsteered(&*site.pod()?, both(KUBELET[0])[1])?;
    // The kernel takes a link down a moment after its pin: then a prefix is as any other.
    node.host()
        .run(&["ip", "route", "add", "local", "198.19.0.0/16", "dev", "lo"])?;
    let listener = node.host().listen(("0.0.0.0", INGRESS))?;
    wait::until(CHANGE, || connect(outside, to, LOST).is_ok()).context("still guarded")?;

    node.host()
        .run(&["ip", "route", "del", "local", "198.19.0.0/16", "dev", "lo"])?;
    drop(listener);
    node.start()?;
    site.until_served()
}
