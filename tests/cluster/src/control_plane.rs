//! The control plane: etcd, the API server, the controller manager and the scheduler.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use tunnel_tests::{
    daemon::Daemon,
    sandbox::{Process, Sandbox},
    wait,
};

use super::{SharedParts, kubectl::Kubectl, network};

/// The time limit for the API server to become ready, even on a busy machine.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// The IPv4 and IPv6 ranges for ClusterIPs.
const SERVICE_RANGES: &str = "10.96.0.0/16,fd00:10:96::/112";

/// The controller manager's option for how long a node may go without status updates before it is marked not
/// ready, along with its pods and endpoints. The default of 50 s is too short for an e2e test that stops the
/// API server for a minute, since no kubelet can update its node's status in that time.
const NODE_GRACE_PERIOD: &str = "--node-monitor-grace-period=10m";

/// An audit policy that logs the requests from service accounts. An e2e test uses this log to find unused
/// permissions.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: [system:serviceaccounts]
- level: None
";

/// The processes of the control plane, which are killed on drop.
#[derive(Debug)]
pub struct ControlPlane {
    pub(super) kubectl: Kubectl,
    api_server: Daemon,
    /// The host that the API server runs on.
    host: Sandbox,
    /// The command that starts the API server.
    command: Vec<String>,
    /// The control plane's other processes, which are killed on drop.
    daemons: Vec<Process>,
}

impl ControlPlane {
    /// Starts the control plane on the cloud node's host, and waits until the API server is ready.
    pub(super) fn start(shared: &SharedParts) -> Result<Self> {
        let mut control_plane = Self::start_api(shared)?;
        control_plane.start_controllers(shared)?;
        Ok(control_plane)
    }

    /// Starts etcd and the API server on the cloud node's host, and waits until the API server is ready.
    pub(super) fn start_api(shared: &SharedParts) -> Result<Self> {
        let host = shared.network.cloud();
        let config = shared.pki.file("admin.kubeconfig");
        let directory = shared.lab.directory().join("kubectl");
        let data = shared.lab.directory().join("etcd").display().to_string();
        let etcd = shared.components.command(&["etcd", "--data-dir", &data]);
        let control_plane = Self {
            kubectl: Kubectl::new(host, &shared.components, config, directory)?,
            api_server: Daemon::new(shared.logs.path("kube-apiserver.log")),
            host: host.clone(),
            command: command(shared, "kube-apiserver", api_server_arguments(shared)?),
            daemons: vec![daemon(shared, "etcd", &etcd)?],
        };
        control_plane.start_api_server()?;
        Ok(control_plane)
    }

    /// Starts the controller manager and the scheduler.
    fn start_controllers(&mut self, shared: &SharedParts) -> Result<()> {
        for (name, arguments) in [
            (
                "kube-controller-manager",
                controller_manager_arguments(shared),
            ),
            ("kube-scheduler", client_arguments(shared, "scheduler")),
        ] {
            let started = daemon(shared, name, &command(shared, name, arguments))?;
            self.daemons.push(started);
        }
        Ok(())
    }

    /// Kills the API server.
    pub fn stop_api_server(&self) -> Result<()> {
        self.api_server.stop(Signal::SIGKILL)
    }

    /// Starts the API server, and waits until it is ready.
    pub fn start_api_server(&self) -> Result<()> {
        self.api_server.start(&self.host, &self.command)?;
        let ready = ["get", "--raw", "/readyz"];
        wait::until(READY_TIMEOUT, || self.kubectl.run(&ready).is_ok())
            .context("the API server did not become ready")
    }
}

/// Starts a control plane process that logs to a file named after it.
fn daemon(shared: &SharedParts, name: &str, command: &[String]) -> Result<Process> {
    let log = shared.logs.create(name)?;
    shared.network.cloud().command(command).log(log).start()
}

/// Returns the command that runs a Kubernetes program.
fn command(shared: &SharedParts, program: &str, arguments: Vec<String>) -> Vec<String> {
    let mut command = shared
        .components
        .command(&[&shared.components.program(program)]);
    command.extend(arguments);
    command
}

fn api_server_arguments(shared: &SharedParts) -> Result<Vec<String>> {
    let pki = |name: &str| shared.pki.file(name);
    let policy = shared.lab.directory().join("audit.yaml");
    fs::write(&policy, AUDIT_POLICY)?;
    let audit_log = shared.logs.path("audit.jsonl");
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
        format!("--service-cluster-ip-range={SERVICE_RANGES}"),
        format!("--service-account-issuer={issuer}"),
        format!("--service-account-key-file={}", pki("accounts.pub")),
        format!("--service-account-signing-key-file={}", pki("accounts.key")),
        format!("{kubelet}-certificate={}", pki("apiserver-kubelet.crt")),
        format!("{kubelet}-key={}", pki("apiserver-kubelet.key")),
        format!("--kubelet-certificate-authority={}", pki("ca.crt")),
        "--kubelet-preferred-address-types=InternalIP,Hostname".to_owned(),
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", audit_log.display()),
    ])
}

fn controller_manager_arguments(shared: &SharedParts) -> Vec<String> {
    let pki = |name: &str| shared.pki.file(name);
    let volume_plugins = shared.lab.directory().join("volume-plugins");
    let mut arguments = client_arguments(shared, "controllers");
    arguments.extend([
        format!("--service-account-private-key-file={}", pki("accounts.key")),
        format!("--root-ca-file={}", pki("ca.crt")),
        "--use-service-account-credentials".to_owned(),
        format!("--cluster-signing-cert-file={}", pki("ca.crt")),
        format!("--cluster-signing-key-file={}", pki("ca.key")),
        "--allocate-node-cidrs=false".to_owned(),
        NODE_GRACE_PERIOD.to_owned(),
        format!("--flex-volume-plugin-dir={}", volume_plugins.display()),
    ]);
    arguments
}

/// Returns the arguments for a program that is only a client of the API server.
fn client_arguments(shared: &SharedParts, user: &str) -> Vec<String> {
    let config = shared.pki.file(&format!("{user}.kubeconfig"));
    vec![
        format!("--kubeconfig={config}"),
        format!("--authentication-kubeconfig={config}"),
        format!("--authorization-kubeconfig={config}"),
        "--bind-address=127.0.0.1".to_owned(),
        "--leader-elect=false".to_owned(),
    ]
}
