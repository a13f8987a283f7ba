//! Bytes: all of them, in order, and none held up by a stream that stalls.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::{Instant, timeout},
};
use tunnel_common::reason::Reason;

use super::harness::{SOON, World, limits, pattern, read, rest};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_each_end_says_reaches_the_other_and_its_end_does_too() {
    let world = World::new().await;
    let (mut client, mut target) = world.pair().await;

    client.write_all(b"ping").await.expect("written");
    assert_eq!(read(&mut target, 4).await, b"ping");
    target.write_all(b"pong").await.expect("written");
    assert_eq!(read(&mut client, 4).await, b"pong");

    client.write_all(b"last").await.expect("written");
    client.shutdown().await.expect("ended");
    assert_eq!(rest(&mut target).await, b"last", "an end, not a reset");
    target.write_all(b"and mine").await.expect("half open");
    drop(target);
    assert_eq!(rest(&mut client).await, b"and mine");

    world.cloud.counted(Reason::StreamServed, 1).await;
    world.edge.counted(Reason::StreamServed, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_may_end_first_or_speak_first() {
    let world = World::new().await;
    let mut client = TcpStream::connect(world.steered).await.expect("connected");
    let accepted = timeout(SOON, world.target.accept()).await.expect("soon");
    let (mut target, _) = accepted.expect("accepted");

    target.write_all(b"banner").await.expect("written");
    assert_eq!(read(&mut client, 6).await, b"banner");
    target.shutdown().await.expect("ended");
    assert_eq!(rest(&mut client).await, b"");
    client.write_all(b"still here").await.expect("half open");
    drop(client);
    assert_eq!(rest(&mut target).await, b"still here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn megabytes_both_ways_at_once_arrive_whole() {
    let world = World::new().await;
    let (client, target) = world.pair().await;
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
    let all = timeout(3 * SOON, both.join_all()).await;
    all.expect("neither waits for the other");
}

/// An echo at the target's end.
async fn echo(stream: TcpStream) {
    let (mut reader, mut writer) = stream.into_split();
    drop(tokio::io::copy(&mut reader, &mut writer).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_readers_that_stall_delay_no_other_stream() {
    let world = World::new().await;
    let chunk = vec![7_u8; 64 << 10];
    let mut stalled = Vec::new();
    let mut floods = JoinSet::new();
    for _ in 0..200 {
        let (client, mut target) = world.pair().await;
        stalled.push(client);
        let chunk = chunk.clone();
        // More than the window and all the sockets' buffers on the way hold.
        floods.spawn(async move { while target.write_all(&chunk).await.is_ok() {} });
    }
    let (mut client, target) = world.pair().await;
    floods.spawn(echo(target));

    let mut slowest = Duration::ZERO;
    for _ in 0..200 {
        let begun = Instant::now();
        client.write_all(b"ping").await.expect("written");
        assert_eq!(read(&mut client, 4).await, b"ping");
        slowest = slowest.max(begun.elapsed());
    }
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");

    // And those that read again get the rest.
    for client in &mut stalled {
        assert_eq!(read(client, 2 << 20).await, vec![7; 2 << 20]);
    }
    assert_eq!(world.cloud.sessions("edge-7"), 1, "still the same session");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn window_that_was_taken_comes_back_with_what_was_written() {
    // Each byte of the window is used many times over.
    let mut small = limits();
    small.window = 65_535;
    let world = World::with(&small, &small).await;
    let (mut client, mut target) = world.pair().await;
    let bytes = pattern(8 << 20);

    let (written, got) = tokio::join!(
        async {
            target.write_all(&bytes).await.expect("written");
            target.shutdown().await.expect("ended");
        },
        rest(&mut client)
    );

    let () = written;
    assert!(got == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_writes_to_a_reader_that_stalls_do_not_close_the_session() {
    let world = World::new().await;
    let (mut client, mut target) = world.pair().await;
    // Fill what is on the way, then go on in frames of a byte each.
    let chunk = vec![1_u8; 64 << 10];
    let mut sent = 0;
    while let Ok(written) = timeout(Duration::from_millis(300), client.write(&chunk)).await {
        sent += written.expect("written");
    }
    let (other, mut other_target) = world.pair().await;
    other.set_nodelay(true).expect("set");
    for _ in 0..5000 {
        other.try_write(b"x").expect("written");
        tokio::task::yield_now().await;
    }
    assert_eq!(read(&mut other_target, 5000).await, vec![b'x'; 5000]);

    assert_eq!(read(&mut target, sent).await, vec![1; sent]);
    assert_eq!(world.cloud.sessions("edge-7"), 1);
    assert_eq!(world.cloud.count(Reason::AgentLost), 0);
}
