//! A relay that delays all bytes, for agents on slow links.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

/// The maximum number of chunks in flight on a link, in each direction.
const MAX_IN_FLIGHT: usize = 64;
/// The maximum size of a chunk.
const CHUNK: usize = 16 << 10;

/// Binds a port on the loopback interface whose connections lead to `to`, and delays all bytes by `delay` in each
/// direction. Returns the port's address, and a future that forwards connections.
pub(super) async fn listen(
    to: SocketAddr,
    delay: Duration,
) -> Result<(SocketAddr, impl Future<Output = ()>)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let serve = async move {
        let mut links = JoinSet::new();
        loop {
            tokio::select! {
                Ok((near, _)) = listener.accept() => drop(links.spawn(forward(near, to, delay))),
                Some(_) = links.join_next() => {}
            }
        }
    };
    Ok((address, serve))
}

async fn forward(near: TcpStream, to: SocketAddr, delay: Duration) {
    // The round trip of the TCP handshake.
    sleep(delay * 2).await;
    let Ok(far) = TcpStream::connect(to).await else {
        return;
    };
    let [(near_reader, near_writer), (far_reader, far_writer)] =
        [near, far].map(TcpStream::into_split);
    tokio::join!(
        forward_late(near_reader, far_writer, delay),
        forward_late(far_reader, near_writer, delay)
    );
}

async fn forward_late(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) {
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_IN_FLIGHT);
    let read = async move {
        let mut bytes = vec![0; CHUNK];
        while let Ok(length @ 1..) = from.read(&mut bytes).await {
            let part = bytes.get(..length).unwrap_or_default().to_vec();
            if sender.send((Instant::now() + delay, part)).await.is_err() {
                break;
            }
        }
    };
    let write = async move {
        while let Some((due, part)) = receiver.recv().await {
            sleep_until(due).await;
            if to.write_all(&part).await.is_err() {
                break;
            }
        }
        drop(to.shutdown().await);
    };
    tokio::join!(read, write);
}
