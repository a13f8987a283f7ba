//! An instance of Culvert: a `culvert node` daemon with its own cgroup, BPF file system, manifest directory
//! and state directory.

mod settings;

use std::{
    fs, iter,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;

pub use self::settings::InstanceSettings;
use crate::{
    admin,
    daemon::Daemon,
    edge_node::identity_and_session_config,
    manifest::{Manifest, NodeObject},
    node_network::{self, HOST_V4, HOST_V6},
    pod::path_to_string,
    sandbox::{COMMAND_TIMEOUT, Output, Sandbox},
    wait,
};

/// The time limit for the daemon to become ready: long enough for as many Services as fit in memory.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// The node's name, both in its config and in its Node object.
pub const NODE_NAME: &str = "node-a";

/// An instance of `culvert node`. Its daemon is killed on drop.
#[derive(Debug)]
pub struct Instance {
    daemon: Daemon,
    host: Sandbox,
    directory: PathBuf,
    settings: InstanceSettings,
}

impl Instance {
    /// Prepares an instance by creating its directories, its config and the manifest of its Node.
    pub fn new(
        host: Sandbox,
        directory: PathBuf,
        cgroup: &Path,
        settings: InstanceSettings,
    ) -> Result<Self> {
        let instance = Self {
            daemon: Daemon::new(directory.join("culvert.log")),
            host,
            directory,
            settings,
        };
        fs::create_dir_all(instance.manifests())?;
        fs::create_dir_all(instance.state())?;
        fs::write(instance.config_path(), instance.config(cgroup))
            .with_context(|| format!("cannot write {}", instance.config_path().display()))?;
        instance.apply(Self::node())?;
        Ok(instance)
    }

    /// Builds the instance's Node object.
    #[must_use]
    pub fn node() -> NodeObject {
        NodeObject::new(NODE_NAME, [HOST_V4.into(), HOST_V6.into()])
    }

    /// Returns the sandbox in which the daemon runs.
    #[must_use]
    pub const fn host(&self) -> &Sandbox {
        &self.host
    }

    /// Returns the manifest directory that the daemon watches.
    #[must_use]
    pub fn manifests(&self) -> PathBuf {
        self.directory.join("manifests")
    }

    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.directory.join("culvert.yaml")
    }

    /// Returns the daemon's state directory.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// Returns the path of the daemon's admin socket, a Unix socket.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.state().join("admin.sock")
    }

    /// Returns the path that `bpf.bpffs` is set to, which exists only inside the host's mount namespace.
    #[must_use]
    pub fn bpffs_inside(&self) -> PathBuf {
        self.directory.join("bpffs/culvert")
    }

    /// Returns a path by which the directory in `bpf.bpffs` can be reached from outside the host's mount
    /// namespace, for example to open pins.
    #[must_use]
    pub fn bpffs(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.host.pid()));
        root.join(
            self.bpffs_inside()
                .strip_prefix("/")
                .unwrap_or(&self.directory),
        )
    }

    fn config(&self, cgroup: &Path) -> String {
        let InstanceSettings {
            culvert: _,
            maps: _,
            admin,
            healthz,
            tunnel,
            namespace_share,
            node_ports,
            gateway: _,
            test_connections,
        } = &self.settings;
        let [pods4, pods6] = node_network::POD_RANGES;
        format!(
            "nodeName: {NODE_NAME}\n\
             mode: ebpf\n\
             source: {{ file: {{ path: {manifests} }} }}\n\
             service:\n\
             \x20 clusterCIDRs: [\"{pods4}\", \"{pods6}\"]\n\
             \x20 namespaceShare: {namespace_share}\n\
             \x20 {node_ports}\n\
             bpf:\n\
             \x20 cgroup: {cgroup}\n\
             \x20 bpffs: {bpffs}\n\
             {test_connections}\
             \x20 {sizes}\n\
             stateDir: {state}\n\
             admin: {{ address: \"{admin}\" }}\n\
             healthz: {{ address: \"{healthz}\" }}\n\
             {tunnel}",
            manifests = self.manifests().display(),
            cgroup = cgroup.display(),
            bpffs = self.bpffs_inside().display(),
            test_connections = test_connections.map_or_else(String::new, |interval| {
                format!("  testConnectionInterval: {interval}\n")
            }),
            sizes = self.settings.maps_yaml(),
            state = self.state().display(),
            tunnel = if *tunnel {
                self.tunnel_config()
            } else {
                String::new()
            },
        )
    }

    /// Changes the map sizes in the config. The change takes effect when the daemon next starts.
    pub fn resize(&self, change: impl FnOnce(&mut InstanceSettings)) -> Result<()> {
        let mut settings = self.settings.clone();
        change(&mut settings);
        let sizes = settings.maps_yaml();
        let config = fs::read_to_string(self.config_path())?;
        let (before, rest) = config
            .split_once("  maps: {")
            .context("the config has no `maps`")?;
        let (_, after) = rest
            .split_once('\n')
            .context("the config ends within `maps`")?;
        fs::write(self.config_path(), format!("{before}  {sizes}\n{after}"))
            .context("cannot write the config")
    }

    fn tunnel_config(&self) -> String {
        let end = identity_and_session_config(&self.identity_directory());
        let gateway = &self.settings.gateway;
        format!("tunnel:\n  steering: {{}}\n  gateway: {{ {gateway} }}\n{end}")
    }

    /// Returns the directory that contains the gateway's certificate, laid out as by `culvert ca issue`.
    #[must_use]
    pub fn identity_directory(&self) -> PathBuf {
        self.directory.join("identity")
    }

    #[must_use]
    pub fn program(&self) -> &Path {
        &self.settings.culvert
    }

    /// Adds or replaces a manifest in the manifest directory as an editor would: writes it to a file
    /// elsewhere, then renames that file.
    pub fn apply(&self, manifest: impl Into<Manifest>) -> Result<()> {
        let Manifest { file, text } = manifest.into();
        let draft = self.directory.join(format!("{file}.draft"));
        fs::write(&draft, text).with_context(|| format!("cannot write {}", draft.display()))?;
        fs::rename(&draft, self.manifests().join(&file))
            .with_context(|| format!("cannot move {file} into the directory of manifests"))
    }

    /// Removes a file from the manifest directory.
    pub fn delete(&self, file: &str) -> Result<()> {
        fs::remove_file(self.manifests().join(file))
            .with_context(|| format!("cannot remove the manifest {file}"))
    }

    /// Starts the daemon and waits until it is ready.
    pub fn start(&self) -> Result<()> {
        self.launch()?;
        self.wait_ready()
    }

    /// Starts the daemon, but does not wait until it is ready.
    pub fn launch(&self) -> Result<()> {
        self.launch_with(&[])
    }

    /// Starts the daemon with `command` as a prefix of its command line.
    pub fn launch_with(&self, command: &[String]) -> Result<()> {
        let argv = [command, &self.command_line(&["node"])?].concat();
        self.daemon.start(&self.host, &argv)
    }

    /// Waits until the launched daemon is live. It may still not be ready, for example because a port is in
    /// use or a map is full.
    pub fn wait_ready(&self) -> Result<()> {
        let ready = wait::until_ready(READY_LIMIT, || self.daemon.try_wait(), || self.is_live());
        ready.with_context(|| {
            let log_end = self.daemon.log_tail();
            format!("the daemon isn't ready; the end of its log:\n{log_end}")
        })
    }

    /// Returns true if the daemon responds to `/livez` with status 200.
    #[must_use]
    pub fn is_live(&self) -> bool {
        admin::get(&self.admin_socket(), "/livez").is_ok_and(|answer| answer.status == 200)
    }

    /// Returns true if `/status` reports `ready: true`.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.status().is_ok_and(|status| status["ready"] == true)
    }

    pub fn kill9(&self) -> Result<()> {
        self.daemon.stop(Signal::SIGKILL)
    }

    /// Stops the daemon with SIGTERM; it must exit successfully.
    pub fn stop(&self) -> Result<()> {
        self.daemon.stop(Signal::SIGTERM)
    }

    pub fn restart(&self) -> Result<()> {
        self.stop()?;
        self.start()
    }

    /// Returns the daemon's process ID, or `None` if the daemon has not been started or has been stopped.
    #[must_use]
    pub fn daemon_pid(&self) -> Option<i32> {
        self.daemon.pid()
    }

    /// Returns the daemon's log, including what earlier processes of this instance have written to it.
    #[must_use]
    pub fn logs(&self) -> String {
        self.daemon.logs()
    }

    /// Returns the daemon's `/status`, parsed as JSON.
    pub fn status(&self) -> Result<serde_json::Value> {
        self.json("/status")
    }

    /// Returns the daemon's `/services`, parsed as JSON.
    pub fn services(&self) -> Result<serde_json::Value> {
        self.json("/services")
    }

    fn json(&self, path: &str) -> Result<serde_json::Value> {
        let answer = admin::get(&self.admin_socket(), path)?;
        serde_json::from_str(&answer.body)
            .with_context(|| format!("the response to {path} is not JSON"))
    }

    /// Returns the text of the daemon's `/metrics`.
    pub fn metrics(&self) -> Result<String> {
        Ok(admin::get(&self.admin_socket(), "/metrics")?.body)
    }

    /// Returns the value of the counter for the reason with the given label, or 0 if the metrics don't
    /// include that reason.
    pub fn reason_count(&self, label: &str) -> Result<u64> {
        Ok(self.reason_counts(&[label])?[0])
    }

    /// Returns how often each of the reasons in `labels` occurred, all read at the same moment.
    pub fn reason_counts(&self, labels: &[&str]) -> Result<Vec<u64>> {
        let metrics = self.metrics()?;
        let count = |label| {
            let name = format!("culvert_reason_total{{reason=\"{label}\"}}");
            admin::metric(&metrics, &name).unwrap_or(0)
        };
        Ok(labels.iter().map(count).collect())
    }

    /// Runs another `culvert` subcommand with this instance's config, and waits until it exits.
    pub fn culvert(&self, arguments: &[&str]) -> Result<Output> {
        self.host
            .command(&self.command_line(arguments)?)
            .start()?
            .finish(COMMAND_TIMEOUT)
    }

    fn command_line(&self, arguments: &[&str]) -> Result<Vec<String>> {
        let [program, config] = [
            path_to_string(self.program())?,
            path_to_string(&self.config_path())?,
        ];
        let arguments = arguments.iter().map(|&argument| argument.to_owned());
        let words = iter::once(program).chain(arguments);
        Ok(words.chain(["--config".to_owned(), config]).collect())
    }
}
