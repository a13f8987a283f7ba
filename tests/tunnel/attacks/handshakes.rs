//! Tests in which outsiders without a certificate occupy the gateway's handshakes.
#![expect(
    clippy::print_stdout,
    reason = "prints the memory and the times that it limits"
)]

use std::{
    collections::VecDeque,
    io::{self, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock::{Instant, pause},
    hostile_peer,
    pki::Validity,
    process_usage,
};

use crate::{
    fixture::{ANSWER, TunnelSettings, echo, expect_fast_echoes},
    targets::{Behaviour, Server},
};

/// The gateway's default limit on handshakes in progress.
const HANDSHAKES: usize = 4096;
/// The gateway's default timeout for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The memory that this many handshakes may take.
const MEMORY_LIMIT: u64 = 128 << 20;
/// The time that bytes take on a slow link, in each direction.
const DELAY: Duration = Duration::from_millis(100);
/// The time within which an agent on a slow link must be connected. A handshake takes three round trips.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The number of connections that outsiders open per second.
const RATE: u32 = 700;

/// Forwards a connection with a delay, until it ends.
fn forward_late(mut from: TcpStream, mut to: TcpStream) -> io::Result<()> {
    let (sender, receiver) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
    let writer = thread::spawn(move || {
        for (at, bytes) in receiver {
            pause(DELAY.saturating_sub(at.elapsed()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        drop(to.shutdown(Shutdown::Both));
    });
    let mut bytes = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut bytes) {
        let part = bytes.get(..length).unwrap_or_default().to_vec();
        if sender.send((Instant::now(), part)).is_err() {
            break;
        }
    }
    drop(sender);
    drop(writer.join());
    Ok(())
}

/// Starts a relay to `to` that delays all bytes. Returns its address.
fn start_slow_link(to: SocketAddr) -> Result<SocketAddr> {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(to) else {
                continue;
            };
            if let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) {
                thread::spawn(move || forward_late(near, far));
                thread::spawn(move || forward_late(far_too, near_too));
            }
        }
    });
    Ok(address)
}

#[test]
fn agents_on_slow_links_connect_beside_a_crowd_of_outsiders() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let mut settings = TunnelSettings::of(&[server.at()]);
    settings.handshakes = HANDSHAKES;
    settings.handshake_timeout = HANDSHAKE_TIMEOUT;
    let mut tunnel = settings.start()?;
    let gateway = tunnel.gateway();
    let pid = tunnel.cloud()?.pid();
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    let before = process_usage::peak_memory(pid)?;

    // The outsiders have the address of the agents, as behind one NAT gateway.
    let hello = hostile_peer::client_hello()?;
    let is_over = AtomicBool::new(false);
    let connected = thread::scope(|scope| {
        scope.spawn(|| {
            let mut open = VecDeque::new();
            let start = Instant::now();
            for number in 0_u32.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                if let Ok(mut stream) = TcpStream::connect(gateway) {
                    drop(stream.write_all(&hello));
                    open.push_back(stream);
                }
                if open.len() > HANDSHAKES {
                    open.pop_front();
                }
                let due = Duration::from_secs(1) * number / RATE;
                pause(due.saturating_sub(start.elapsed()));
            }
        });
        let result = (|| {
            // The crowd has evicted handshakes of its own before the agent comes.
            let evicted = || tunnel.count("handshake_limit").is_ok_and(|count| count > 0);
            tunnel_tests::wait::until(3 * ANSWER, evicted).context("the limit is never reached")?;
            expect_fast_echoes("next to a crowd of outsiders", &mut live)?;
            let link = start_slow_link(gateway)?;
            tunnel.set_gateway(link);
            let start = Instant::now();
            let pair = tunnel.authority().agent("b", Validity::Current)?;
            tunnel.launch_agent("b", &pair)?;
            tunnel.until_connected("b")?;
            Ok::<_, anyhow::Error>(start.elapsed())
        })();
        is_over.store(true, Ordering::Relaxed);
        result
    })?;

    let used = process_usage::peak_memory(pid)?.saturating_sub(before);
    println!(
        "connected after {connected:?}; {HANDSHAKES} handshakes took {} KiB",
        used >> 10
    );
    ensure!(connected <= CONNECT_LIMIT, "{connected:?}");
    ensure!(
        used <= MEMORY_LIMIT,
        "{HANDSHAKES} handshakes took {used} bytes"
    );
    Ok(())
}
