//! Measures how long it takes until connections on a node reflect a change at the API server, for Culvert and
//! for kube-proxy in nftables mode. Two hosts, one for each proxy, watch the same API server.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    path::PathBuf,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Args;
use serde::Serialize;
use serde_json::json;
use socket2::{Domain, Type};
use tunnel_cluster::{
    api_client::ApiClient,
    components::Components,
    logs::Logs,
    minimal_cluster::{Host, MinimalCluster},
    proxy,
};
use tunnel_tests::{
    address::nth_address,
    clock::{self, Instant},
    load::{nanoseconds, percentile},
    process_usage,
    sandbox::{Process, Sandbox, connect_within},
    table::{format_table, microseconds},
    wait,
};

use crate::report::{CommonOptions, Verdict, median, ratio, run_rounds, thousandths};

/// The first Service's ClusterIP, and the port of every Service.
const FIRST_CLUSTER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 16, 0));
const PORT: u16 = 80;
/// The Service whose endpoint changes, and the two endpoints that it alternates between.
const PROBE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 8, 8)), PORT);
const PROBE_ENDPOINTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 129, 0, 1), Ipv4Addr::new(10, 129, 0, 2)];
/// The first endpoint's address. All endpoint addresses are local to both hosts.
const ENDPOINTS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 130, 0, 0));
const ENDPOINT_RANGE: &str = "10.128.0.0/9";
const TARGET_PORT: u16 = 8080;
const ENDPOINTS_PER_SERVICE: u32 = 5;

/// The number of evenly spaced Services that must respond before a start counts as complete.
const SAMPLED_SERVICES: u32 = 200;
/// The number of concurrent connections to the API server over which the objects are created.
const API_CONNECTIONS: u32 = 8;

/// The timeout for one connect(). It can be short because a translated connection stays on the host, and must
/// be because an untranslated one may not fail until its first packet is retransmitted a second later.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(20);
/// The timeout for one response, and the time limit for repeated connection attempts.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
const WAIT_LIMIT: Duration = Duration::from_secs(180);
/// The pause between changes, which keeps the work for one change from overlapping with the next.
const PAUSE: Duration = Duration::from_millis(20);

/// The targets: start time and memory relative to kube-proxy's, in thousandths, and the p50 and p99 of the
/// time until a change takes effect.
const START_TARGET: u64 = 250;
const MEMORY_TARGET: u64 = 500;
const CHANGE_P50_TARGET: Duration = Duration::from_millis(5);
const CHANGE_P99_TARGET: Duration = Duration::from_millis(50);

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The directory that contains the programs prepared by `cargo xtask e2e`.
    #[arg(long)]
    kit: PathBuf,
    /// The number of Services, with five endpoints each.
    #[arg(long, default_value_t = 5000)]
    services: u32,
    /// The number of cold starts to measure for each proxy.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// The number of endpoint changes to measure for Culvert; a tenth as many are measured for kube-proxy.
    #[arg(long, default_value_t = 200)]
    changes: u32,
}

/// The measurements for one proxy.
#[derive(Clone, Debug, Default, Serialize)]
struct Measurements {
    name: &'static str,
    starts_ns: Vec<u64>,
    start_ns: u64,
    changes: usize,
    change_p50_ns: u64,
    change_p99_ns: u64,
    change_max_ns: u64,
    resident_bytes: u64,
}

#[derive(Serialize)]
struct Report {
    services: u32,
    measured: [Measurements; 2],
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let components = Components::open(&options.kit)?;
    let logs = Logs::new(components.logs())?;
    let cluster = MinimalCluster::start(components, logs)?;
    let proxies = [culvert(&cluster, options)?, kube_proxy(&cluster, options)?];
    create_objects(&cluster, &proxies, options.services)?;
    let mut measured = [0, 1].map(|at| Measurements {
        name: proxies[at].name,
        ..Measurements::default()
    });
    run_rounds(options.rounds.max(1), &[0, 1], |at| {
        let (proxy, of) = (&proxies[*at], &mut measured[*at]);
        let sandbox = &proxy.host.sandbox;
        let log = cluster.shared.logs.create(proxy.name)?;
        let began = Instant::now();
        let process = sandbox.command(&proxy.start).log(log).start()?;
        wait_for_all(sandbox, options.services)?;
        of.starts_ns.push(nanoseconds(began.elapsed()));
        if of.starts_ns.len() == 1 {
            measure(&cluster, proxy, &process, of)?;
        }
        drop(process);
        sandbox.run(&proxy.clear)
    })?;
    for of in &mut measured {
        of.start_ns = median(of.starts_ns.iter().copied());
    }
    let verdicts = verdicts(&measured);
    let text = text(options.services, &measured);
    let outcome = Report {
        services: options.services,
        measured,
    };
    options.common.report(&outcome, &text, &verdicts)
}

fn verdicts([own, peer]: &[Measurements; 2]) -> Vec<Verdict> {
    let start = ratio(own.start_ns, peer.start_ns);
    let memory = ratio(own.resident_bytes, peer.resident_bytes);
    let at_most = |what: &str, ratio: u64, limit: u64| {
        let target = format!("{what} at most {} of kube-proxy's", thousandths(limit));
        Verdict::new(target, thousandths(ratio), ratio <= limit)
    };
    let within = |what: &str, value: u64, limit: Duration| {
        let target = format!("a change, {what}, within {} ms", limit.as_millis());
        Verdict::new(target, microseconds(value), value <= nanoseconds(limit))
    };
    vec![
        at_most("start", start, START_TARGET),
        within("median", own.change_p50_ns, CHANGE_P50_TARGET),
        within("99th of 100", own.change_p99_ns, CHANGE_P99_TARGET),
        at_most("memory", memory, MEMORY_TARGET),
    ]
}

/// A proxy and its host, with the commands that start the proxy and clean up after it.
struct Proxy {
    name: &'static str,
    host: Host,
    start: Vec<String>,
    clear: Vec<String>,
    changes: u32,
}

fn culvert(cluster: &MinimalCluster, options: &Options) -> Result<Proxy> {
    let (host, directory) = (host(cluster, 0)?, cluster.shared.lab.directory());
    let path = directory.join("culvert.yaml");
    let config = format!(
        "nodeName: {}\nsource: {{ kube: {{ kubeconfig: {} }} }}\n\
         bpf: {{ cgroup: {} }}\nstateDir: {}\n",
        host.name,
        cluster.kubeconfig(),
        host.cgroup.display(),
        directory.join("state").display(),
    );
    fs::write(&path, config)?;
    let program = options.common.program()?.display().to_string();
    let config = format!("--config={}", path.display());
    let command = |word: &str| vec![program.clone(), word.to_owned(), config.clone()];
    Ok(Proxy {
        name: "culvert",
        host,
        start: command("node"),
        clear: command("cleanup"),
        changes: options.changes,
    })
}

fn kube_proxy(cluster: &MinimalCluster, options: &Options) -> Result<Proxy> {
    let (host, components) = (host(cluster, 1)?, &cluster.shared.components);
    let path = cluster.shared.lab.directory().join("kube-proxy.yaml");
    fs::write(&path, proxy::config(host.name, &cluster.kubeconfig()))?;
    let config = format!("--config={}", path.display());
    Ok(Proxy {
        name: "kube-proxy (nftables)",
        host,
        start: components.command(&[&components.program("kube-proxy"), &config]),
        clear: components.command(&["nft", "flush", "ruleset"]),
        changes: options.changes / 10,
    })
}

/// Creates a host that responds to connections to any endpoint.
fn host(cluster: &MinimalCluster, number: usize) -> Result<Host> {
    let host = cluster.host(number)?;
    host.sandbox
        .ip(&format!("route add local {ENDPOINT_RANGE} dev lo"))?;
    let listener = host.sandbox.listen((Ipv4Addr::UNSPECIFIED, TARGET_PORT))?;
    // The thread runs until the process exits.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            drop(send_local_address(stream));
        }
    });
    Ok(host)
}

/// Creates the Nodes, Services and EndpointSlices.
fn create_objects(cluster: &MinimalCluster, proxies: &[Proxy], services: u32) -> Result<()> {
    let mut api = cluster.api()?;
    for Proxy { host, .. } in proxies {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": host.name}});
        api.post("/api/v1/nodes", &node.to_string())?;
        let addresses = [json!({"type": "InternalIP", "address": host.address})];
        let status = json!({"status": {"addresses": addresses}});
        let path = format!("/api/v1/nodes/{}/status", host.name);
        api.patch(&path, &status.to_string())?;
    }
    create_service(&mut api, "probe", PROBE.ip(), &[PROBE_ENDPOINTS[0].into()])?;
    let create = |first: u32| -> Result<()> {
        let mut api = cluster.api()?;
        for number in (first..services).step_by(usize::try_from(API_CONNECTIONS)?) {
            let endpoint = |index| nth_address(ENDPOINTS, number * ENDPOINTS_PER_SERVICE + index);
            let endpoints: Vec<IpAddr> = (0..ENDPOINTS_PER_SERVICE).map(endpoint).collect();
            let name = format!("svc-{number}");
            create_service(
                &mut api,
                &name,
                nth_address(FIRST_CLUSTER_IP, number),
                &endpoints,
            )?;
        }
        Ok(())
    };
    tunnel_cluster::run_concurrently(0..API_CONNECTIONS, create).map(drop)
}

/// Waits until the probe Service and a sample of the other Services respond.
fn wait_for_all(sandbox: &Sandbox, services: u32) -> Result<()> {
    let step = usize::try_from((services / SAMPLED_SERVICES).max(1))?;
    let numbers = (0..services).step_by(step);
    for number in numbers.chain([services.saturating_sub(1)]) {
        let to = SocketAddr::new(nth_address(FIRST_CLUSTER_IP, number), PORT);
        wait_for_address(sandbox, to, |_| true)?;
    }
    wait_for_address(sandbox, PROBE, |_| true)
}

/// Changes the probe Service's endpoint repeatedly, measuring how long each change takes to have effect, and
/// then measures the proxy's memory.
fn measure(
    cluster: &MinimalCluster,
    proxy: &Proxy,
    process: &Process,
    of: &mut Measurements,
) -> Result<()> {
    let mut api = cluster.api()?;
    let mut times = Vec::new();
    for number in 1..=usize::try_from(proxy.changes.max(2))? {
        let endpoint_address = PROBE_ENDPOINTS[number % PROBE_ENDPOINTS.len()];
        let patch = json!({"endpoints": [endpoint(endpoint_address.into())]});
        let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/probe-1";
        api.patch(path, &patch.to_string())?;
        let answered = Instant::now();
        wait_for_address(&proxy.host.sandbox, PROBE, |seen| {
            seen == IpAddr::from(endpoint_address)
        })?;
        times.push(nanoseconds(answered.elapsed()));
        clock::pause(PAUSE);
    }
    times.sort_unstable();
    of.changes = times.len();
    of.change_p50_ns = percentile(&times, 50);
    of.change_p99_ns = percentile(&times, 99);
    of.change_max_ns = times.last().copied().unwrap_or(0);
    of.resident_bytes = process_usage::resident_memory(process.pid())?;
    Ok(())
}

/// Sends the client the address that it is connected to.
fn send_local_address(mut stream: TcpStream) -> io::Result<()> {
    let reached = stream.local_addr()?.ip();
    writeln!(stream, "{reached}")
}

/// Connects repeatedly until `is_wanted` accepts the address that responds.
fn wait_for_address(
    sandbox: &Sandbox,
    to: SocketAddr,
    is_wanted: impl Fn(IpAddr) -> bool,
) -> Result<()> {
    wait::until_briefly(WAIT_LIMIT, || {
        connected_address(sandbox, to).is_ok_and(&is_wanted)
    })
    .with_context(|| format!("connects to {to} don't reach the expected endpoint"))
}

fn connected_address(sandbox: &Sandbox, to: SocketAddr) -> Result<IpAddr> {
    let socket = sandbox.socket(Domain::for_address(to), Type::STREAM)?;
    connect_within(&socket, to, CONNECT_TIMEOUT)?;
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(TcpStream::from(socket)).read_line(&mut line)?;
    line.trim()
        .parse()
        .context("the response is not an IP address")
}

fn endpoint(address: IpAddr) -> serde_json::Value {
    json!({"addresses": [address], "conditions": {"ready": true}})
}

/// Creates a Service and its EndpointSlice.
fn create_service(
    api: &mut ApiClient,
    name: &str,
    address: IpAddr,
    endpoints: &[IpAddr],
) -> Result<()> {
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": address, "ports": [{"port": PORT, "targetPort": TARGET_PORT}]},
    });
    api.post("/api/v1/namespaces/default/services", &service.to_string())?;
    let endpoints: Vec<_> = endpoints.iter().copied().map(endpoint).collect();
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{name}-1"),
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": TARGET_PORT, "protocol": "TCP"}],
        "endpoints": endpoints,
    });
    let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    api.post(path, &slice.to_string())
}

fn text(services: u32, measured: &[Measurements; 2]) -> String {
    let table = format_table(
        measured,
        &[
            ("", |of| of.name.to_owned()),
            ("start", |of| format!("{} ms", of.start_ns / 1_000_000)),
            ("changes", |of| of.changes.to_string()),
            ("p50", |of| microseconds(of.change_p50_ns)),
            ("p99", |of| microseconds(of.change_p99_ns)),
            ("longest", |of| microseconds(of.change_max_ns)),
            ("RSS", |of| format!("{} MiB", of.resident_bytes >> 20)),
        ],
    );
    format!(
        "{services} Services of {ENDPOINTS_PER_SERVICE} endpoints; from the start of the proxy, and from the answer to a PATCH of \
         an EndpointSlice, until connects show it\n{table}"
    )
}
