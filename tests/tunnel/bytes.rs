//! Tests that streams deliver all bytes unchanged, and end properly.

use std::{
    io::Read as _,
    net::{IpAddr, Shutdown, TcpStream},
    thread,
};

use anyhow::{Result, ensure};
use tunnel_tests::{
    fake_kubelet::{Sum, SumBuilder, client::Client, send, server::FakeKubelet},
    load_scale::LoadScale,
    wait,
};

use crate::{
    fixture::{ANSWER, TunnelSettings, dial, echo},
    targets::{Behaviour, Server},
};

/// The number of bytes to send in each direction.
const BYTES_EACH_WAY: u32 = 1 << 30;

/// Reads until EOF, and returns the checksum of the bytes.
fn receive(stream: &mut TcpStream) -> Result<Sum> {
    let mut received = SumBuilder::default();
    let mut buffer = vec![0; 256 * 1024];
    loop {
        let read = stream.read(&mut buffer)?;
        if read == 0 {
            return Ok(received.finish());
        }
        received.add(&buffer[..read]);
    }
}

#[test]
fn a_gigabyte_each_way_at_once_arrives_as_it_was_sent() -> Result<()> {
    let length = u64::from(LoadScale::from_environment().count(BYTES_EACH_WAY));
    let server = Server::start(Behaviour::Echo)?;
    let tunnel = TunnelSettings::of(&[server.at()]).start()?;
    let mut receiving = tunnel.connect(server.at())?;
    let mut sending = receiving.try_clone()?;

    let sender = thread::spawn(move || -> Result<Sum> {
        let sent = send(&mut sending, length)?;
        sending.shutdown(Shutdown::Write)?;
        Ok(sent)
    });
    let received = receive(&mut receiving);
    // If both failed, the sender's error is reported, because the receiver's error is only a consequence.
    let (sent, received) = (sender.join().expect("no panic")?, received?);

    ensure!(received == sent, "received {received}, sent {sent}");
    ensure!(server.accepted() == 1);
    tunnel.until_counted("stream_completed", 1)
}

#[test]
fn two_hundred_streams_at_once_keep_their_bytes_apart() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let tunnel = TunnelSettings::of(&[server.at()]).start()?;
    let address = tunnel.steering_address_of(server.at())?;
    let mut clients = Vec::new();
    for number in 0_u32..200 {
        clients.push((number, dial(address)?));
    }

    let exchange = |(number, mut stream): (u32, TcpStream)| {
        thread::spawn(move || -> Result<()> {
            let own: Vec<u8> = number.to_be_bytes().repeat(4000);
            for _ in 0..10 {
                echo(&mut stream, &own)?;
            }
            Ok(())
        })
    };
    let threads: Vec<_> = clients.into_iter().map(exchange).collect();
    for thread in threads {
        thread.join().expect("no panic")?;
    }

    ensure!(server.accepted() == 200);
    tunnel.until_counted("stream_completed", 200)
}

#[test]
fn a_client_sees_the_kubelets_own_certificate_and_an_upgrade_that_stays_open() -> Result<()> {
    let address = IpAddr::from([10, 20, 0, 7]);
    let (kubelet, tls) = FakeKubelet::start("edge-7", address)?;
    let tunnel = TunnelSettings::of(&[kubelet.address()]).start()?;
    let stream = tunnel.connect(kubelet.address())?;
    let mut client = Client::handshake(stream, address, tls)?;
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
