//! Measures how long it takes until many agents that all need a certificate at once have got one from two controllers, on a real
//! API server, and how much memory the controllers use.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

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

use crate::report::{CommonOptions, Verdict};

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
    resident_bytes: Vec<u64>,
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
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
    let trust = directory.join("ca.pem");
    wait::until(WAIT_LIMIT, || {
        trusted_cas(&cluster).is_ok_and(|text| fs::write(&trust, text).is_ok())
    })
    .context("the controllers create no CA")?;

    let took = cluster.host(0)?.sandbox.in_network(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(request_all(&cluster, options.agents, &directory))
    })?;
    let resident = controllers
        .iter()
        .map(|process| process_usage::resident_memory(process.pid()))
        .collect::<Result<Vec<_>>>()?;
    let most = resident.iter().copied().max().unwrap_or(0);
    let report = Report {
        agents: options.agents,
        all_ns: nanoseconds(took),
        resident_bytes: resident,
    };
    let text = format!(
        "{} agents got their certificates in {:.1} s; a controller has at most {:.1} MB in memory\n",
        options.agents,
        took.as_secs_f32(),
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

/// Runs a requester for each agent until all have a certificate. Returns the time that this took.
async fn request_all(
    cluster: &MinimalCluster,
    agents: u32,
    directory: &std::path::Path,
) -> Result<Duration> {
    let (drain, draining) = watch::channel(false);
    let mut tasks = JoinSet::new();
    let mut states = Vec::new();
    let start = Instant::now();
    for number in 0..agents {
        let node = node_name(number);
        let directory = directory.join(&node);
        fs::create_dir(&directory)?;
        let settings = KubeSettings {
            kubeconfig: Some(cluster.kubelet_kubeconfig(&node)?.into()),
            ..KubeSettings::default()
        };
        let client = kube::client(&Arc::new(settings)).await?;
        let wanted = Wanted {
            role: Role::Agent,
            node,
            life: None,
            ca: directory.with_file_name("ca.pem"),
            directory: directory.join("identity"),
        };
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
        ensure!(took < WAIT_LIMIT, "only {done} of {agents} certificates");
        let mut rest = PROGRESS_INTERVAL;
        // The end is noticed at once.
        while !rest.is_zero() && !states.iter().all(|state| state.borrow().received > 0) {
            let pause = Duration::from_millis(100);
            sleep(pause).await;
            rest = rest.saturating_sub(pause);
        }
    }
}
