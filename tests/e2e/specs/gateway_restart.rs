//! Checks that the only gateway can be replaced while a command on an edge node runs: the command goes on until the
//! end of the drain, and new connections to the edge node are refused only briefly.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    clock::{Instant, pause},
    sandbox::connect_within,
    wait,
};

use super::edge_commands::on_edge;
use crate::{
    fixture::{Client, Fixture, client_pod},
    manifests::NAMESPACE,
};

/// The interval between two connects.
const INTERVAL: Duration = Duration::from_millis(100);
/// The time limit for a connect and for the kubelet's response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum time for which connects may be refused.
const MAX_REFUSAL: Duration = Duration::from_secs(2);
/// The minimum time for which the command goes on after the restart has begun: `tunnel.session.drainTimeout` is
/// 30 s.
const MIN_DRAIN: Duration = Duration::from_secs(28);
/// The time limit for the command to end.
const MAX_DRAIN: Duration = Duration::from_secs(60);

pub(super) fn refuses_connects_briefly(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |node| {
        let kubelet = kubelet_of(fixture, node)?;
        let cloud = fixture.cluster.nodes.first().context("no node")?.name;
        let mut clients = fixture.clients.iter();
        let client = clients.find(|client| client.name == cloud);
        let client = client.with_context(|| format!("there is no client on {cloud}"))?;
        ensure!(is_served(client, kubelet), "the kubelet does not respond");
        let pod = client_pod(node);
        let arguments = ["-n", NAMESPACE, "exec", &pod, "--", "sleep", "600"];
        let command = fixture.kubectl().start(&arguments)?;

        let stop = AtomicBool::new(false);
        let (restarted, connects) = thread::scope(|scope| {
            let connects = scope.spawn(|| connect_until(&stop, client, kubelet));
            let restarted = restart(fixture, || Ok(command.try_wait()?.is_some()));
            stop.store(true, Ordering::Relaxed);
            (restarted, connects.join())
        });
        let drained_after = restarted?;
        let connects = connects.map_err(|_panic| anyhow::anyhow!("the client panicked"))?;
        let failed: Vec<_> = connects.iter().filter(|it| !it.served).collect();
        let refused = match (failed.first(), failed.last()) {
            (Some(first), Some(last)) => last.end.duration_since(first.start),
            _ => Duration::ZERO,
        };
        let of = connects.len();
        println!(
            "the command ended after {:.1} s; {} of {of} connects failed, within {:.1} s",
            drained_after.as_secs_f32(),
            failed.len(),
            refused.as_secs_f32()
        );
        ensure!(
            drained_after >= MIN_DRAIN,
            "the command ended {drained_after:?} after the restart began"
        );
        ensure!(refused <= MAX_REFUSAL, "connects failed for {refused:?}");
        Ok(())
    })
}

/// Restarts the DaemonSet with the gateway, and waits until its new pod is ready. Returns the time after which the
/// command has ended.
fn restart(fixture: &Fixture<'_>, has_ended: impl Fn() -> Result<bool>) -> Result<Duration> {
    const NAME: &str = "ds/culvert-cloud";
    let kubectl = fixture.kubectl();
    ensure!(!has_ended()?, "`kubectl exec` has exited");
    let start = Instant::now();
    kubectl.run(&["-n", "kube-system", "rollout", "restart", NAME])?;
    wait::until(MAX_DRAIN, || has_ended().unwrap_or(true))
        .context("`kubectl exec` does not end with the drain")?;
    let drained_after = start.elapsed();
    kubectl.wait_for_rollout("kube-system", NAME)?;
    // Another pod of the DaemonSet may be replaced later.
    pause(Duration::from_secs(2));
    Ok(drained_after)
}

/// The result of a connect to the kubelet.
struct Connect {
    start: Instant,
    end: Instant,
    served: bool,
}

fn connect_until(stop: &AtomicBool, client: &Client, kubelet: SocketAddr) -> Vec<Connect> {
    let mut connects = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        let served = is_served(client, kubelet);
        let end = Instant::now();
        connects.push(Connect { start, end, served });
        pause(INTERVAL.saturating_sub(start.elapsed()));
    }
    connects
}

/// Returns true if the kubelet responds to a request without TLS: it names its protocol.
fn is_served(client: &Client, kubelet: SocketAddr) -> bool {
    let request = || -> Result<String> {
        let socket = client
            .sandbox
            .socket(Domain::for_address(kubelet), Type::STREAM)?;
        connect_within(&socket, kubelet, RESPONSE_TIMEOUT)?;
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        stream.write_all(b"GET /healthz HTTP/1.0\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    };
    request().is_ok_and(|response| response.contains("HTTPS server"))
}

/// Returns the address of a node's kubelet.
fn kubelet_of(fixture: &Fixture<'_>, node: &str) -> Result<SocketAddr> {
    let path = "jsonpath={.status.addresses[?(@.type==\"InternalIP\")].address}";
    let addresses = fixture.kubectl().run(&["get", "node", node, "-o", path])?;
    let first = addresses.split_whitespace().next();
    let address = first.with_context(|| format!("{node} has no InternalIP"))?;
    Ok(SocketAddr::new(address.parse()?, 10_250))
}
