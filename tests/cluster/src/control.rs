//! The control plane: etcd, the API server, the controllers and the scheduler.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tunnel_tests::{
    daemon::Daemon,
    place::{Place, Process},
    wait,
};

use super::{Site, kubectl::Kubectl, network};

/// The time that the API server has to answer on a busy machine.
const READY: Duration = Duration::from_secs(120);

/// The ranges of ClusterIPs.
const SERVICES: &str = "10.96.0.0/16,fd00:10:96::/112";

/// Without the API server, no kubelet can post its node's status, and a node without a status for 50 s
/// becomes not ready, with its pods and endpoints. A spec that stops the API server for longer tests the
/// last known state, so it needs a longer period.
const NODES_STAY_READY: &str = "--node-monitor-grace-period=10m";

/// The audit policy: requests of service accounts, from which a spec finds unused rights.
const AUDIT: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: [system:serviceaccounts]
- level: None
";

/// The processes of the control plane; they end on drop.
#[derive(Debug)]
pub struct Control {
    pub(super) kubectl: Kubectl,
    api_server: Daemon,
    /// The place and the command of the API server.
    host: Place,
    command: Vec<String>,
    /// The other processes, held for their drop.
    daemons: Vec<Process>,
}

impl Control {
    /// Starts the control plane on the cloud's host, and waits until the API server answers.
    pub(super) fn start(site: &Site) -> Result<Self> {
        let mut control = Self::start_api(site)?;
        control.start_rest(site)?;
        Ok(control)
    }

    /// Starts etcd and the API server on the cloud's host, and waits until the latter answers.
    pub(super) fn start_api(site: &Site) -> Result<Self> {
        let host = site.network.cloud();
        let config = site.pki.file("admin.kubeconfig");
        let folder = site.lab.folder().join("kubectl");
        let data = site.lab.folder().join("etcd").display().to_string();
        let etcd = site.kit.command(&["etcd", "--data-dir", &data]);
        let control = Self {
            kubectl: Kubectl::new(host, &site.kit, config, folder)?,
            api_server: Daemon::new(site.logs.path("kube-apiserver.log")),
            host: host.clone(),
            command: command(site, "kube-apiserver", api_server(site)?),
            daemons: vec![daemon(site, "etcd", &etcd)?],
        };
        control.start_api_server()?;
        Ok(control)
    }

    /// Starts the controllers and the scheduler.
    fn start_rest(&mut self, site: &Site) -> Result<()> {
        for (name, arguments) in [
            ("kube-controller-manager", controllers(site)),
            ("kube-scheduler", client(site, "scheduler")),
        ] {
            let started = daemon(site, name, &command(site, name, arguments))?;
            self.daemons.push(started);
        }
        Ok(())
    }

    /// Kills the API server.
    pub fn stop_api_server(&self) -> Result<()> {
        self.api_server.end(Signal::SIGKILL)
    }

    /// Starts or restarts the API server, and waits until it answers.
    pub fn start_api_server(&self) -> Result<()> {
        self.api_server.start(&self.host, &self.command)?;
        let ready = ["get", "--raw", "/readyz"];
        wait::until(READY, || self.kubectl.run(&ready).is_ok())
            .context("the API server doesn't get ready")
    }
}

/// Starts a process of the control plane, with a log of its name.
fn daemon(site: &Site, name: &str, command: &[String]) -> Result<Process> {
    let log = site.logs.create(name)?;
    site.network.cloud().command(command).log(log).start()
}

/// Builds the command of a Kubernetes program.
fn command(site: &Site, program: &str, arguments: Vec<String>) -> Vec<String> {
    let mut command = site.kit.command(&[&site.kit.program(program)]);
    command.extend(arguments);
    command
}

fn api_server(site: &Site) -> Result<Vec<String>> {
    let pki = |name: &str| site.pki.file(name);
    let policy = site.lab.folder().join("audit.yaml");
    fs::write(&policy, AUDIT)?;
    let audit = site.logs.path("audit.jsonl");
    let [address, _] = network::addresses(0);
    let issuer = "https://kubernetes.default.svc.cluster.local";
    let kubelet = "--kubelet-client";
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
        format!("{kubelet}-certificate={}", pki("apiserver-kubelet.crt")),
        format!("{kubelet}-key={}", pki("apiserver-kubelet.key")),
        format!("--kubelet-certificate-authority={}", pki("ca.crt")),
        "--kubelet-preferred-address-types=InternalIP,Hostname".to_owned(),
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", audit.display()),
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

/// Returns the arguments of a component that is only a client of the API server.
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
