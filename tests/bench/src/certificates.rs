//! Measures how long it takes until many agents that all need a certificate at once have got one from two controllers, on a real
//! API server, and how much memory the controllers use. Each agent has a session with a gateway and a stream through it, and the
//! streams must outlast the renewal.

mod streams;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinSet, time::sleep};
use tunnel_cluster::{components::Components, logs::Logs, minimal_cluster::MinimalCluster};
use tunnel_tests::{clock::Instant, load::nanoseconds, process_usage, sandbox::Process, wait};
use tunnel_userspace::{
    identity::{
        Role,
        requester::{KubeApi, RequestState, Requester, Wanted},
    },
    source::kube::{self, KubeSettings},
};

use self::streams::{FirstCa, Streams};
use crate::{
    descriptor_limit,
    report::{CommonOptions, Verdict},
};

/// The number of controllers, as in the manifests.
const CONTROLLERS: u16 = 2;
/// The admin port of the first controller.
const FIRST_PORT: u16 = 10_287;
/// The number of concurrent connections to the API server over which the Nodes are created.
const API_CONNECTIONS: u32 = 8;
/// The time limit for all certificates.
const WAIT_LIMIT: Duration = Duration::from_secs(600);
/// The interval at which the progress is printed.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The number of descriptors per agent that the process needs which has most of them: the agents' process, for two sessions
/// through its relay and a stream.
const DESCRIPTORS: u64 = 8;

/// The targets: the time until all agents have a certificate, and the resident memory of a controller.
const TIME_TARGET: Duration = Duration::from_secs(180);
const MEMORY_TARGET: u64 = 50_000_000;

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The directory that contains the programs prepared by `cargo xtask e2e`.
    #[arg(long)]
    kit: PathBuf,
    /// The number of agents that need a certificate at once.
    #[arg(long, default_value_t = 2000)]
    agents: u32,
}

#[derive(Serialize)]
struct Report {
    agents: u32,
    all_ns: u64,
    /// The time until all agents had renewed their sessions, too.
    sessions_ns: u64,
    streams_cut: usize,
    resident_bytes: Vec<u64>,
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    descriptor_limit::raise(u64::from(options.agents) * DESCRIPTORS)?;
    let components = Components::open(&options.kit)?;
    let logs = Logs::new(components.logs())?;
    let cluster = MinimalCluster::start(components, logs)?;
    println!("create {} Nodes ...", options.agents);
    create_objects(&cluster, options.agents)?;
    let controllers = (0..CONTROLLERS)
        .map(|number| start_controller(&cluster, options, number))
        .collect::<Result<Vec<_>>>()?;
    let directory = cluster.shared.lab.directory().join("agents");
    fs::create_dir(&directory)?;
    let mut trusted = None;
    wait::until(WAIT_LIMIT, || {
        trusted = trusted_cas(&cluster).ok();
        trusted.is_some()
    })
    .context("the controllers create no CA")?;
    println!("connect {} agents ...", options.agents);
    let ca = FirstCa::new()?;
    let trust = trusted.unwrap_or_default() + &ca.pem();
    fs::write(directory.join("ca.pem"), &trust)?;
    let wanted: Vec<_> = (0..options.agents)
        .map(|number| wanted(&node_name(number), &directory, &ca))
        .collect::<Result<_>>()?;
    let nodes = wanted.iter().map(|it| (it.node.clone(), it.files()));
    let mut streams = Streams::open(&ca, &trust, nodes.collect(), &directory)?;

    let start = Instant::now();
    let took = cluster.host(0)?.sandbox.in_network(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(request_all(&cluster, wanted))
    })?;
    let resident = controllers
        .iter()
        .map(|process| process_usage::resident_memory(process.pid()))
        .collect::<Result<Vec<_>>>()?;
    println!("wait for the sessions ...");
    streams.wait_for_renewal()?;
    let sessions_took = start.elapsed();
    let cut = streams.count_cut();
    let most = resident.iter().copied().max().unwrap_or(0);
    let report = Report {
        agents: options.agents,
        all_ns: nanoseconds(took),
        sessions_ns: nanoseconds(sessions_took),
        streams_cut: cut,
        resident_bytes: resident,
    };
    let text = format!(
        "{} agents got their certificates in {:.1} s, and had renewed their sessions after {:.1} s; a controller has at most \
         {:.1} MB in memory\n",
        options.agents,
        took.as_secs_f32(),
        sessions_took.as_secs_f32(),
        Megabytes(most)
    );
    let verdicts = [
        Verdict::new(
            format!("all certificates within {} s", TIME_TARGET.as_secs()),
            format!("{:.1} s", took.as_secs_f32()),
            took <= TIME_TARGET,
        ),
        Verdict::new(
            "a controller below 50 MB".to_owned(),
            format!("{:.1} MB", Megabytes(most)),
            most < MEMORY_TARGET,
        ),
        Verdict::new(
            format!("none of {} streams is cut", options.agents),
            cut.to_string(),
            cut == 0,
        ),
    ];
    options.common.report(&report, &text, &verdicts)
}

/// A number of bytes, displayed in megabytes.
struct Megabytes(u64);

impl std::fmt::Display for Megabytes {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tenths = self.0 / 100_000;
        write!(to, "{}.{}", tenths / 10, tenths % 10)
    }
}

/// Creates the agents' Nodes, and the empty Secret and ConfigMap of the CA, as in the manifests.
fn create_objects(cluster: &MinimalCluster, agents: u32) -> Result<()> {
    let mut api = cluster.api()?;
    for (kind, path) in [("Secret", "secrets"), ("ConfigMap", "configmaps")] {
        let object = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": "culvert-ca"}});
        let path = format!("/api/v1/namespaces/kube-system/{path}");
        // The API server creates the namespace after its start.
        wait::until(WAIT_LIMIT, || api.post(&path, &object.to_string()).is_ok())?;
    }
    let create = |first: u32| -> Result<()> {
        let mut api = cluster.api()?;
        for number in (first..agents).step_by(usize::try_from(API_CONNECTIONS)?) {
            let name = node_name(number);
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
            api.post("/api/v1/nodes", &node.to_string())?;
        }
        Ok(())
    };
    tunnel_cluster::run_concurrently(0..API_CONNECTIONS, create).map(drop)
}

fn node_name(number: u32) -> String {
    format!("edge-{number}")
}

fn start_controller(cluster: &MinimalCluster, options: &Options, number: u16) -> Result<Process> {
    let path = cluster
        .shared
        .lab
        .directory()
        .join(format!("controller-{number}.yaml"));
    let config = format!(
        "source: {{ kube: {{ kubeconfig: {} }} }}\n\
         controller: {{ adminAddress: \"127.0.0.1:{}\" }}\n",
        cluster.kubeconfig(),
        FIRST_PORT + number,
    );
    fs::write(&path, config)?;
    let program = options.common.program()?.display().to_string();
    let config = format!("--config={}", path.display());
    let log = cluster
        .shared
        .logs
        .create(&format!("controller-{number}"))?;
    let sandbox = cluster.host(0)?.sandbox;
    let command = [program, "controller".to_owned(), config];
    sandbox.command(&command).log(log).start()
}

/// Returns the trusted CAs that the controllers have published.
fn trusted_cas(cluster: &MinimalCluster) -> Result<String> {
    let path = "/api/v1/namespaces/kube-system/configmaps/culvert-ca";
    let object: Value = serde_json::from_str(&cluster.api()?.get(path)?)?;
    let text = object["data"]["ca.pem"].as_str().unwrap_or_default();
    ensure!(!text.is_empty(), "there is no CA");
    Ok(text.to_owned())
}

/// Returns the certificate that a node's agent requests, and writes its first one, which must be renewed.
fn wanted(node: &str, directory: &Path, ca: &FirstCa) -> Result<Wanted> {
    let wanted = Wanted {
        role: Role::Agent,
        node: node.to_owned(),
        life: None,
        ca: directory.join("ca.pem"),
        directory: directory.join(node),
    };
    fs::create_dir(&wanted.directory)?;
    ca.write_certificate(node, &wanted.files())?;
    Ok(wanted)
}

/// Runs a requester for each agent until all have a certificate. Returns the time that this took.
async fn request_all(cluster: &MinimalCluster, agents: Vec<Wanted>) -> Result<Duration> {
    let (drain, draining) = watch::channel(false);
    let mut tasks = JoinSet::new();
    let mut states = Vec::new();
    let start = Instant::now();
    for wanted in agents {
        let settings = KubeSettings {
            kubeconfig: Some(cluster.kubelet_kubeconfig(&wanted.node)?.into()),
            ..KubeSettings::default()
        };
        let client = kube::client(&Arc::new(settings)).await?;
        let clock = Box::new(Timestamp::now);
        let (requester, state) = Requester::new(wanted, KubeApi::new(client), clock);
        states.push(state);
        tasks.spawn(requester.run(draining.clone()));
    }
    let has_one = |state: &&watch::Receiver<RequestState>| state.borrow().received > 0;
    loop {
        let done = states.iter().filter(has_one).count();
        let took = start.elapsed();
        println!("{:.0} s: {done} certificates", took.as_secs_f32());
        if done == states.len() {
            drain.send_replace(true);
            while tasks.join_next().await.is_some() {}
            return Ok(took);
        }
        ensure!(
            took < WAIT_LIMIT,
            "only {done} of {} certificates",
            states.len()
        );
        let mut rest = PROGRESS_INTERVAL;
        // The end is noticed at once.
        while !rest.is_zero() && !states.iter().all(|state| state.borrow().received > 0) {
            let pause = Duration::from_millis(100);
            sleep(pause).await;
            rest = rest.saturating_sub(pause);
        }
    }
}
