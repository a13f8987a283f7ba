//! Measures the delay from a change at the API server until connects on a node use it, for Culvert and for
//! kube-proxy in nftables mode. Two hosts watch the same API server, one for each proxy.

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
    api::Api,
    bare::{Bare, Host},
    kit::Kit,
    logs::Logs,
    proxy,
};
use tunnel_tests::{
    clock::{self, Instant},
    load::{nanoseconds, percentile, race::offset},
    place::{Place, Process, connect_within},
    table::{in_columns, microseconds},
    usage, wait,
};

use crate::report::{Common, Verdict, median, ratio, rounds, thousandths};

/// The first ClusterIP of the Services, and the port of each.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 16, 0));
const PORT: u16 = 80;
/// The Service whose endpoint changes, and its two endpoints.
const PROBE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 8, 8)), PORT);
const SIDES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 129, 0, 1), Ipv4Addr::new(10, 129, 0, 2)];
/// The first address of the endpoints. All of their addresses are local to both hosts.
const ENDPOINTS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 130, 0, 0));
const RANGE: &str = "10.128.0.0/9";
const TARGET: u16 = 8080;
const OF_EACH: u32 = 5;

/// The number of Services, evenly spaced, that must respond before a start counts as complete.
const ASKED: u32 = 200;
/// The number of concurrent connections to the API server that create the objects.
const MAKERS: u32 = 8;

/// The timeout of one connect. A translated connect stays on the host; an untranslated one may fail only
/// after a retransmission, one second later.
const CONNECT: Duration = Duration::from_millis(20);
/// The timeout of one response, and the time limit of repeated connects.
const ANSWER: Duration = Duration::from_secs(2);
const LOOKING: Duration = Duration::from_secs(180);
/// The pause between two changes, so that the work of one does not overlap with the next.
const REST: Duration = Duration::from_millis(20);

/// Targets: start time and memory in thousandths of kube-proxy's values, and the times of changes.
const START: u64 = 250;
const MEMORY: u64 = 500;
const CHANGED: Duration = Duration::from_millis(5);
const CHANGED_LATE: Duration = Duration::from_millis(50);

/// The options of the benchmark.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// The folder of programs that `cargo xtask e2e` prepares.
    #[arg(long)]
    kit: PathBuf,
    /// The number of Services, of five endpoints each.
    #[arg(long, default_value_t = 5000)]
    services: u32,
    /// The number of cold starts of each proxy.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// The number of endpoint changes; kube-proxy gets a tenth of them.
    #[arg(long, default_value_t = 200)]
    changes: u32,
}

/// The measurements of one proxy.
#[derive(Clone, Debug, Default, Serialize)]
struct Measured {
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
struct Outcome {
    services: u32,
    measured: [Measured; 2],
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let kit = Kit::open(&options.kit)?;
    let logs = Logs::new(kit.logs())?;
    let bare = Bare::start(kit, logs)?;
    let proxies = [culvert(&bare, options)?, kube_proxy(&bare, options)?];
    fill(&bare, &proxies, options.services)?;
    let mut measured = [0, 1].map(|at| Measured {
        name: proxies[at].name,
        ..Measured::default()
    });
    rounds(options.rounds.max(1), &[0, 1], |at| {
        let (proxy, of) = (&proxies[*at], &mut measured[*at]);
        let place = &proxy.host.place;
        let log = bare.site.logs.create(proxy.name)?;
        let began = Instant::now();
        let process = place.command(&proxy.start).log(log).start()?;
        until_all(place, options.services)?;
        of.starts_ns.push(nanoseconds(began.elapsed()));
        if of.starts_ns.len() == 1 {
            measure(&bare, proxy, &process, of)?;
        }
        drop(process);
        place.run(&proxy.clear)
    })?;
    for of in &mut measured {
        of.start_ns = median(of.starts_ns.iter().copied());
    }
    let verdicts = verdicts(&measured);
    let text = text(options.services, &measured);
    let outcome = Outcome {
        services: options.services,
        measured,
    };
    options.common.report(&outcome, &text, &verdicts)
}

fn verdicts([own, peer]: &[Measured; 2]) -> Vec<Verdict> {
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
        at_most("start", start, START),
        within("median", own.change_p50_ns, CHANGED),
        within("99th of 100", own.change_p99_ns, CHANGED_LATE),
        at_most("memory", memory, MEMORY),
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

fn culvert(bare: &Bare, options: &Options) -> Result<Proxy> {
    let (host, folder) = (host(bare, 0)?, bare.site.lab.folder());
    let path = folder.join("culvert.yaml");
    let config = format!(
        "nodeName: {}\nsource: {{ kube: {{ kubeconfig: {} }} }}\n\
         bpf: {{ cgroup: {} }}\nstateDir: {}\n",
        host.name,
        bare.kubeconfig(),
        host.cgroup.display(),
        folder.join("state").display(),
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

fn kube_proxy(bare: &Bare, options: &Options) -> Result<Proxy> {
    let (host, kit) = (host(bare, 1)?, &bare.site.kit);
    let path = bare.site.lab.folder().join("kube-proxy.yaml");
    fs::write(&path, proxy::config(host.name, &bare.kubeconfig()))?;
    let config = format!("--config={}", path.display());
    Ok(Proxy {
        name: "kube-proxy (nftables)",
        host,
        start: kit.command(&[&kit.program("kube-proxy"), &config]),
        clear: kit.command(&["nft", "flush", "ruleset"]),
        changes: options.changes / 10,
    })
}

/// Creates a host that answers connections to any endpoint.
fn host(bare: &Bare, number: usize) -> Result<Host> {
    let host = bare.host(number)?;
    host.place.ip(&format!("route add local {RANGE} dev lo"))?;
    let listener = host.place.listen((Ipv4Addr::UNSPECIFIED, TARGET))?;
    // The thread ends with the process.
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            drop(tell(stream));
        }
    });
    Ok(host)
}

/// Creates the Nodes, Services and EndpointSlices.
fn fill(bare: &Bare, proxies: &[Proxy], services: u32) -> Result<()> {
    let mut api = bare.api()?;
    for Proxy { host, .. } in proxies {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": host.name}});
        api.post("/api/v1/nodes", &node.to_string())?;
        let addresses = [json!({"type": "InternalIP", "address": host.address})];
        let status = json!({"status": {"addresses": addresses}});
        let path = format!("/api/v1/nodes/{}/status", host.name);
        api.patch(&path, &status.to_string())?;
    }
    make(&mut api, "probe", PROBE.ip(), &[SIDES[0].into()])?;
    let maker = |first: u32| -> Result<()> {
        let mut api = bare.api()?;
        for number in (first..services).step_by(usize::try_from(MAKERS)?) {
            let endpoint = |place| offset(ENDPOINTS, number * OF_EACH + place);
            let endpoints: Vec<IpAddr> = (0..OF_EACH).map(endpoint).collect();
            let name = format!("svc-{number}");
            make(&mut api, &name, offset(FIRST, number), &endpoints)?;
        }
        Ok(())
    };
    tunnel_cluster::at_once(0..MAKERS, maker).map(drop)
}

/// Waits until a sample of the Services and the probe Service respond.
fn until_all(place: &Place, services: u32) -> Result<()> {
    let step = usize::try_from((services / ASKED).max(1))?;
    let numbers = (0..services).step_by(step);
    for number in numbers.chain([services.saturating_sub(1)]) {
        let to = SocketAddr::new(offset(FIRST, number), PORT);
        until(place, to, |_| true)?;
    }
    until(place, PROBE, |_| true)
}

/// Changes the probe's endpoint repeatedly, then measures the memory.
fn measure(bare: &Bare, proxy: &Proxy, process: &Process, of: &mut Measured) -> Result<()> {
    let mut api = bare.api()?;
    let mut times = Vec::new();
    for number in 1..=usize::try_from(proxy.changes.max(2))? {
        let side = SIDES[number % SIDES.len()];
        let patch = json!({"endpoints": [endpoint(side.into())]});
        let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/probe-1";
        api.patch(path, &patch.to_string())?;
        let answered = Instant::now();
        until(&proxy.host.place, PROBE, |seen| seen == IpAddr::from(side))?;
        times.push(nanoseconds(answered.elapsed()));
        clock::pause(REST);
    }
    times.sort_unstable();
    of.changes = times.len();
    of.change_p50_ns = percentile(&times, 50);
    of.change_p99_ns = percentile(&times, 99);
    of.change_max_ns = times.last().copied().unwrap_or(0);
    of.resident_bytes = usage::resident(process.pid())?;
    Ok(())
}

/// Sends the client the address that it is connected to.
fn tell(mut stream: TcpStream) -> io::Result<()> {
    let reached = stream.local_addr()?.ip();
    writeln!(stream, "{reached}")
}

/// Connects repeatedly until `is_wanted` accepts the address that responds.
fn until(place: &Place, to: SocketAddr, is_wanted: impl Fn(IpAddr) -> bool) -> Result<()> {
    wait::until_a_moment(LOOKING, || ask(place, to).is_ok_and(&is_wanted))
        .with_context(|| format!("connects to {to} don't reach the expected endpoint"))
}

fn ask(place: &Place, to: SocketAddr) -> Result<IpAddr> {
    let socket = place.socket(Domain::for_address(to), Type::STREAM)?;
    connect_within(&socket, to, CONNECT)?;
    socket.set_read_timeout(Some(ANSWER))?;
    let mut line = String::new();
    BufReader::new(TcpStream::from(socket)).read_line(&mut line)?;
    line.trim().parse().context("the response is not an IP address")
}

fn endpoint(address: IpAddr) -> serde_json::Value {
    json!({"addresses": [address], "conditions": {"ready": true}})
}

/// Creates a Service and its slice.
fn make(api: &mut Api, name: &str, address: IpAddr, endpoints: &[IpAddr]) -> Result<()> {
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": address, "ports": [{"port": PORT, "targetPort": TARGET}]},
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
        "ports": [{"name": "", "port": TARGET, "protocol": "TCP"}],
        "endpoints": endpoints,
    });
    let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    api.post(path, &slice.to_string())
}

fn text(services: u32, measured: &[Measured; 2]) -> String {
    let table = in_columns(
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
        "{services} Services of {OF_EACH} endpoints; from the start of the proxy, and from the answer to a PATCH of \
         an EndpointSlice, until connects show it\n{table}"
    )
}
