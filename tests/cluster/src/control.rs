//! The control plane: etcd, the API server, the controllers and the scheduler.

use std::{
    fs,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tunnel_tests::{
    place::{Place, Process},
    wait,
};

use super::{Site, kubectl::Kubectl, network};

/// How long the API server may take on a busy machine.
const READY: Duration = Duration::from_secs(120);

/// The ranges of Services.
const SERVICES: &str = "10.96.0.0/16,fd00:10:96::/112";

/// Without the API server no kubelet tells of itself, and a node that is silent for 50 s isn't ready, nor
/// are its pods and the endpoints of its Services. A spec that takes the API server away for longer is
/// about what was known before.
const NODES_STAY_READY: &str = "--node-monitor-grace-period=10m";

/// What service accounts asked for: who has more rights than it uses shows here.
const AUDIT: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: [system:serviceaccounts]
- level: None
";

/// Its processes. They end when it is dropped.
#[derive(Debug)]
pub struct Control {
    pub(super) kubectl: Kubectl,
    api_server: Mutex<Option<Process>>,
    /// What starts the API server once more.
    host: Place,
    command: Vec<String>,
    log: PathBuf,
    /// The others: held, not used.
    daemons: Vec<Process>,
}

impl Control {
    /// Starts all of it on the cloud's host, and waits until the API server answers.
    pub(super) fn start(site: &Site) -> Result<Self> {
        let mut control = Self::start_api(site)?;
        control.start_rest(site)?;
        Ok(control)
    }

    /// Starts etcd and the API server there, and waits until it answers.
    pub(super) fn start_api(site: &Site) -> Result<Self> {
        let host = site.network.cloud();
        let config = site.pki.file("admin.kubeconfig");
        let folder = site.lab.folder().join("kubectl");
        let kubectl = Kubectl::new(host, &site.kit, config, folder)?;
        let etcd = daemon(site, host, "etcd", etcd(site))?;
        let served = api_server(site)?;
        let api_server = daemon(site, host, "kube-apiserver", served.clone())?;
        wait::until(READY, || is_ready(&kubectl)).context("the API server doesn't get ready")?;
        Ok(Self {
            kubectl,
            api_server: Mutex::new(Some(api_server)),
            host: host.clone(),
            command: command(site, "kube-apiserver", served),
            log: site.logs.path("kube-apiserver.log"),
            daemons: vec![etcd],
        })
    }

    /// Starts the controllers and the scheduler.
    fn start_rest(&mut self, site: &Site) -> Result<()> {
        for (name, arguments) in [
            ("kube-controller-manager", controllers(site)),
            ("kube-scheduler", scheduler(site)),
        ] {
            let started = daemon(site, &self.host, name, arguments)?;
            self.daemons.push(started);
        }
        Ok(())
    }

    /// Kills the API server.
    pub fn stop_api_server(&self) -> Result<()> {
        let mut api_server = self.lock();
        let process = api_server.take().context("there is no API server")?;
        process.signal(Signal::SIGKILL)?;
        process.wait(READY).map(drop)
    }

    /// Starts the API server again, and waits until it answers.
    pub fn start_api_server(&self) -> Result<()> {
        let log = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&self.log)?;
        let process = self.host.command(&self.command).log(log).start()?;
        *self.lock() = Some(process);
        wait::until(READY, || is_ready(&self.kubectl))
            .context("the API server doesn't get ready again")
    }

    fn lock(&self) -> MutexGuard<'_, Option<Process>> {
        self.api_server
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_ready(kubectl: &Kubectl) -> bool {
    kubectl.run(&["get", "--raw", "/readyz"]).is_ok()
}

/// Starts a part, which writes a log of its name.
fn daemon(site: &Site, host: &Place, name: &str, arguments: Vec<String>) -> Result<Process> {
    let log = site.logs.create(name)?;
    host.command(&command(site, name, arguments))
        .log(log)
        .start()
}

fn command(site: &Site, name: &str, arguments: Vec<String>) -> Vec<String> {
    let mut command = site.kit.environment();
    command.push(match name {
        "etcd" => name.to_owned(),
        other => site.kit.program(other),
    });
    command.extend(arguments);
    command
}

fn etcd(site: &Site) -> Vec<String> {
    let data = site.lab.folder().join("etcd");
    vec![format!("--data-dir={}", data.display())]
}

fn api_server(site: &Site) -> Result<Vec<String>> {
    let pki = |name: &str| site.pki.file(name);
    let policy = site.lab.folder().join("audit.yaml");
    fs::write(&policy, AUDIT)?;
    let [address, _] = network::addresses(0);
    let issuer = "https://kubernetes.default.svc.cluster.local";
    Ok(vec![
        "--etcd-servers=http://127.0.0.1:2379".to_owned(),
        "--secure-port=6443".to_owned(),
        format!("--advertise-address={address}"),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--client-ca-file={}", pki("ca.crt")),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        "--allow-privileged=true".to_owned(),
        format!("--service-cluster-ip-range={SERVICES}"),
        format!("--service-account-issuer={issuer}"),
        format!("--service-account-key-file={}", pki("accounts.pub")),
        format!("--service-account-signing-key-file={}", pki("accounts.key")),
        format!(
            "--kubelet-client-certificate={}",
            pki("apiserver-kubelet.crt")
        ),
        format!("--kubelet-client-key={}", pki("apiserver-kubelet.key")),
        format!("--kubelet-certificate-authority={}", pki("ca.crt")),
        "--kubelet-preferred-address-types=InternalIP,Hostname".to_owned(),
        format!("--audit-policy-file={}", policy.display()),
        format!(
            "--audit-log-path={}",
            site.logs.path("audit.jsonl").display()
        ),
    ])
}

fn controllers(site: &Site) -> Vec<String> {
    let pki = |name: &str| site.pki.file(name);
    let volumes = site.lab.folder().join("volume-plugins");
    let mut arguments = client(site, "controllers");
    arguments.extend([
        format!("--service-account-private-key-file={}", pki("accounts.key")),
        format!("--root-ca-file={}", pki("ca.crt")),
        "--use-service-account-credentials".to_owned(),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        "--allocate-node-cidrs=false".to_owned(),
        NODES_STAY_READY.to_owned(),
        format!("--flex-volume-plugin-dir={}", volumes.display()),
    ]);
    arguments
}

fn scheduler(site: &Site) -> Vec<String> {
    client(site, "scheduler")
}

/// The arguments of a client that serves nobody but itself.
fn client(site: &Site, user: &str) -> Vec<String> {
    let config = site.pki.file(&format!("{user}.kubeconfig"));
    vec![
        format!("--kubeconfig={config}"),
        format!("--authentication-kubeconfig={config}"),
        format!("--authorization-kubeconfig={config}"),
        "--bind-address=127.0.0.1".to_owned(),
        "--leader-elect=false".to_owned(),
    ]
}
