//! Tests of resets: each side of a stream notices when the other resets it, whatever state the stream is in.

use std::time::Duration;

use tokio::{
    io::AsyncWriteExt as _,
    net::TcpStream,
    time::{sleep, timeout},
};
use tunnel_common::reason::Reason;

use super::fixture::{NODE, TunnelFixture, read, read_to_end, read_until_reset, reset, wait_until};

/// Writes until all buffers on the way to the peer are full.
async fn fill_buffers(stream: &mut TcpStream) {
    let chunk = vec![0_u8; 64 << 10];
    while timeout(Duration::from_millis(300), stream.write_all(&chunk))
        .await
        .is_ok()
    {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_is_forwarded_even_while_the_stream_has_no_window() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, target) = tunnel.connect().await;
    reset(target);
    read_until_reset(&mut client).await;

    let (mut client, mut target) = tunnel.connect().await;
    fill_buffers(&mut client).await;
    reset(client);
    tunnel.cloud.counted(Reason::ClientReset, 1).await;
    read_until_reset(&mut target).await;

    let (mut client, mut target) = tunnel.connect().await;
    fill_buffers(&mut target).await;
    reset(target);
    tunnel.edge.counted(Reason::TargetReset, 2).await;
    tunnel.cloud.counted(Reason::TargetReset, 2).await;
    read_until_reset(&mut client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_is_noticed_after_the_client_ended_its_direction() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, mut target) = tunnel.connect().await;
    client.write_all(b"all").await.expect("written");
    client.shutdown().await.expect("ended");
    assert_eq!(read_to_end(&mut target).await, b"all");
    sleep(Duration::from_millis(50)).await;

    // Closing the socket now sends a reset, although the client has already ended its direction.
    reset(client);

    tunnel.cloud.counted(Reason::ClientReset, 1).await;
    tunnel.edge.counted(Reason::ClientReset, 1).await;
    let writes_fail = async { while target.write_all(b"more").await.is_ok() {} };
    timeout(Duration::from_secs(10), writes_fail)
        .await
        .expect("reset");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_cancelled_streams_does_not_end_the_session() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, mut target) = tunnel.connect().await;
    let ended = || tunnel.cloud.sessions.counts().values().sum::<u64>();
    for burst in 0..40 {
        // On a slow machine, streams from earlier bursts may still be open, and this burst would exceed the
        // stream limit.
        wait_until("room", || ended() + 200 >= 25 * burst).await;
        let mut burst = Vec::new();
        for _ in 0..25 {
            let stream = TcpStream::connect(tunnel.steered).await.expect("connected");
            stream.try_write(b"!").expect("written");
            burst.push(stream);
        }
        burst.into_iter().for_each(reset);
    }

    wait_until("the end of each stream", || ended() == 1000).await;
    client.write_all(b"ping").await.expect("written");
    assert_eq!(read(&mut target, 4).await, b"ping");
    assert_eq!(tunnel.cloud.node(NODE).sessions.len(), 1);
    assert_eq!(tunnel.cloud.count(Reason::AgentConnectionLost), 0);
    assert_eq!(tunnel.cloud.count(Reason::ProtocolError), 0);
}
