//! Tests that all bytes arrive in order.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    task::JoinSet,
    time::timeout,
};
use tunnel_common::reason::Reason;

use super::fixture::{TIMEOUT, TunnelFixture, limits, pattern, read, read_to_end};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_and_half_closes_reach_the_other_side() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, mut target) = tunnel.connect().await;

    client.write_all(b"ping").await.expect("written");
    assert_eq!(read(&mut target, 4).await, b"ping");
    target.write_all(b"pong").await.expect("written");
    assert_eq!(read(&mut client, 4).await, b"pong");

    client.write_all(b"last").await.expect("written");
    client.shutdown().await.expect("ended");
    assert_eq!(
        read_to_end(&mut target).await,
        b"last",
        "an end, not a reset"
    );
    target.write_all(b"and mine").await.expect("half open");
    drop(target);
    assert_eq!(read_to_end(&mut client).await, b"and mine");

    let (mut client, mut target) = tunnel.connect().await;
    target.write_all(b"first").await.expect("written");
    target.shutdown().await.expect("ended");
    assert_eq!(read_to_end(&mut client).await, b"first");
    client.write_all(b"late").await.expect("half open");
    drop(client);
    assert_eq!(read_to_end(&mut target).await, b"late");

    tunnel.cloud.counted(Reason::StreamCompleted, 2).await;
    tunnel.edge.counted(Reason::StreamCompleted, 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn megabytes_both_ways_at_once_arrive_completely() {
    let tunnel = TunnelFixture::new().await;
    let (client, target) = tunnel.connect().await;
    let bytes = pattern(24 << 20);
    let mut both = JoinSet::new();
    for stream in [client, target] {
        let bytes = bytes.clone();
        both.spawn(async move {
            let (mut reader, mut writer) = stream.into_split();
            let write = async {
                writer.write_all(&bytes).await.expect("written");
                writer.shutdown().await.expect("ended");
            };
            let mut got = Vec::new();
            let (read, ()) = tokio::join!(reader.read_to_end(&mut got), write);
            read.expect("an end");
            assert!(got == bytes);
        });
    }
    let all = timeout(3 * TIMEOUT, both.join_all()).await;
    all.expect("neither waits for the other");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_window_reopens_as_bytes_are_written() {
    // A small flow-control window, which has to reopen many times.
    let mut small = limits();
    small.stream_window_bytes = 65_535;
    let tunnel = TunnelFixture::with(&small, &small).await;
    let (mut client, mut target) = tunnel.connect().await;
    let bytes = pattern(8 << 20);

    let (written, got) = tokio::join!(
        async {
            target.write_all(&bytes).await.expect("written");
            target.shutdown().await.expect("ended");
        },
        read_to_end(&mut client)
    );

    let () = written;
    assert!(got == bytes);
}
