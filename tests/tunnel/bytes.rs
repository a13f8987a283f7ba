//! Bytes, and how streams end.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use socket2::SockRef;
use tunnel_tests::{
    kubelet::{Sum, Summing, client::Client, pattern, serve::Kubelet},
    pki::{Authority, Files},
    scale::Scale,
    wait,
};

use crate::{
    support::{ANSWER, Plan, Tunnel, echo, expect_reset},
    targets::{Act, GREETING, Server, until_end},
};

/// How many bytes go each way.
const MANY: u32 = 1 << 30;

fn tunnel_to(act: Act) -> Result<(Server, Tunnel)> {
    let server = Server::start(act)?;
    let tunnel = Plan::of(&[server.at()]).start()?;
    Ok((server, tunnel))
}

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
fn what_a_client_sends_comes_back() -> Result<()> {
    let (server, tunnel) = tunnel_to(Act::Echo)?;
    let mut stream = tunnel.connect(server.at())?;

    for length in [1, 64, 1400, 70_000] {
        echo(&mut stream, &pattern()[..length.min(65_000)])?;
    }
    stream.shutdown(Shutdown::Write)?;
    ensure!(stream.read(&mut [0])? == 0);

    tunnel.until_counted("stream_served", 1)?;
    ensure!(server.ended() == 1 && server.reset() == 0);
    Ok(())
}

#[test]
fn a_server_that_speaks_first_is_heard() -> Result<()> {
    let (server, tunnel) = tunnel_to(Act::Greet)?;
    let mut stream = tunnel.connect(server.at())?;

    let mut greeting = vec![0; GREETING.len()];
    stream.read_exact(&mut greeting)?;

    ensure!(greeting == GREETING);
    echo(&mut stream, b"hello")
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
    let (server, tunnel) = tunnel_to(Act::Echo)?;
    let way = tunnel.way_to(server.at())?;
    let mut clients = Vec::new();
    for number in 0_u32..200 {
        clients.push((number, crate::support::dial(way)?));
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

#[test]
fn a_client_that_ends_its_half_still_gets_the_answer() -> Result<()> {
    let (server, tunnel) = tunnel_to(Act::Sum)?;
    let mut stream = tunnel.connect(server.at())?;

    let sent = send(&mut stream, 100_000)?;
    stream.shutdown(Shutdown::Write)?;
    let mut counted = String::new();
    stream.read_to_string(&mut counted)?;

    ensure!(counted.parse::<Sum>()? == sent);
    tunnel.until_counted("stream_served", 1)
}

#[test]
fn a_server_that_ends_its_half_still_gets_what_the_client_sends() -> Result<()> {
    let (server, tunnel) = tunnel_to(Act::Send(1000))?;
    let mut stream = tunnel.connect(server.at())?;

    let received = until_end(&mut stream)?.sum();
    ensure!(received.bytes == 1000 && server.ended() == 0);
    stream.write_all(b"late")?;
    drop(stream);

    wait::until(ANSWER, || server.ended() == 1)?;
    ensure!(server.reset() == 0);
    Ok(())
}

#[test]
fn a_reset_of_the_client_reaches_the_server_as_one() -> Result<()> {
    let (server, tunnel) = tunnel_to(Act::Echo)?;
    let mut stream = tunnel.connect(server.at())?;
    echo(&mut stream, b"hello")?;

    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    drop(stream);

    wait::until(ANSWER, || server.reset() == 1)?;
    ensure!(server.ended() == 0);
    tunnel.until_counted("client_reset", 1)
}

#[test]
fn a_reset_of_the_server_reaches_the_client_as_one() -> Result<()> {
    let (server, mut tunnel) = tunnel_to(Act::Reset)?;
    let mut stream = tunnel.connect(server.at())?;

    stream.write_all(b"x")?;
    expect_reset(&mut stream)?;

    tunnel.until_counted("target_reset", 1)?;
    tunnel.until_agent_counted("a", "target_reset")
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
    let client = Client::over(stream, address, Arc::clone(&files.client()?))?;
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
