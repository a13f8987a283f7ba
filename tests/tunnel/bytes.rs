//! Bytes, and how streams end.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::{Result, ensure};
use tunnel_tests::{
    kubelet::{Sum, Summing, client::Client, pattern, serve::Kubelet},
    pki::{self, Authority, Files},
    scale::Scale,
    wait,
};

use crate::{
    support::{ANSWER, Plan, Tunnel, dial, echo},
    targets::{Act, Server, until_end},
};

/// How many bytes go each way.
const MANY: u32 = 1 << 30;

/// Sends so many bytes of the pattern.
fn send(stream: &mut TcpStream, length: u64) -> Result<Sum> {
    let pattern = pattern();
    let mut summing = Summing::default();
    while summing.bytes() < length {
        let left = usize::try_from(length - summing.bytes())?;
        let part = &pattern[..pattern.len().min(left)];
        stream.write_all(part)?;
        summing.add(part);
    }
    Ok(summing.sum())
}

#[test]
fn a_gigabyte_each_way_at_once_arrives_as_it_was_sent() -> Result<()> {
    let length = u64::from(Scale::from_environment().count(MANY));
    let (up, down) = (Server::start(Act::Sum)?, Server::start(Act::Send(length))?);
    let tunnel = Plan::of(&[up.at(), down.at()]).start()?;
    let mut sending = tunnel.connect(up.at())?;
    let mut receiving = tunnel.connect(down.at())?;

    let sender = thread::spawn(move || -> Result<(Sum, Sum)> {
        let sent = send(&mut sending, length)?;
        sending.shutdown(Shutdown::Write)?;
        let mut counted = String::new();
        sending.read_to_string(&mut counted)?;
        Ok((sent, counted.parse()?))
    });
    let received = until_end(&mut receiving)?.sum();
    drop(receiving);
    let (sent, counted) = sender.join().expect("no panic")?;

    ensure!(counted == sent, "{counted} for {sent}");
    ensure!(received == sent, "{received} for {sent}");
    tunnel.until_counted("stream_served", 2)
}

#[test]
fn two_hundred_streams_at_once_keep_their_bytes_apart() -> Result<()> {
    let server = Server::start(Act::Echo)?;
    let tunnel = Plan::of(&[server.at()]).start()?;
    let way = tunnel.way_to(server.at())?;
    let mut clients = Vec::new();
    for number in 0_u32..200 {
        clients.push((number, dial(way)?));
    }

    let speak = |(number, mut stream): (u32, TcpStream)| {
        thread::spawn(move || -> Result<()> {
            let own: Vec<u8> = number.to_be_bytes().repeat(4000);
            for _ in 0..10 {
                echo(&mut stream, &own)?;
            }
            Ok(())
        })
    };
    let threads: Vec<_> = clients.into_iter().map(speak).collect();
    for thread in threads {
        thread.join().expect("no panic")?;
    }

    ensure!(server.accepted() == 200);
    tunnel.until_counted("stream_served", 200)
}

/// A kubelet behind a tunnel, and a client of it that dialled the address of its node.
fn kubelet() -> Result<(Kubelet, Tunnel, Client)> {
    let folder = tempfile::tempdir()?;
    let authority = Authority::new("kubelets")?;
    let files = Files::of(folder.path(), "kubelet");
    let address = SocketAddr::from(([10, 20, 0, 7], 10_250)).ip();
    files.write(&authority.pem(), &authority.server("edge-7", &[address])?)?;
    let kubelet = Kubelet::start(TcpListener::bind("127.0.0.1:0")?, files.server()?)?;
    let tunnel = Plan::of(&[kubelet.address()]).start()?;
    let stream = tunnel.connect(kubelet.address())?;
    let client = Client::over(stream, address, pki::trusting(&files.ca)?)?;
    Ok((kubelet, tunnel, client))
}

#[test]
fn a_client_sees_the_kubelets_own_certificate_and_an_upgrade_that_stays_open() -> Result<()> {
    let (kubelet, _tunnel, mut client) = kubelet()?;
    ensure!(client.subject().contains("edge-7"));

    client.healthz()?;
    client.upgrade()?;
    for _ in 0..50 {
        client.exchange(b"a frame")?;
    }
    client.close()?;

    let done = || kubelet.exchanges().first().is_some_and(|it| it.over);
    wait::until(ANSWER, done)?;
    let steps = kubelet.exchanges().remove(0).steps;
    let expected = [
        "GET /healthz",
        "GET /upgrade",
        "upgraded",
        "echoed 350",
        "closed",
    ];
    ensure!(steps == expected, "{steps:?}");
    Ok(())
}

#[test]
fn a_half_close_over_tls_is_kept_and_a_reset_is_told() -> Result<()> {
    let (kubelet, _tunnel, client) = kubelet()?;

    let sum = client.until_end(300_000)?;

    let steps = kubelet.exchanges().remove(0).steps;
    ensure!(steps[1].contains(&sum.to_string()), "{steps:?}");

    let (_kubelet, _tunnel, client) = self::kubelet()?;
    client.reset()
}
