//! A node: its container runtime and its kubelet.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use tunnel_tests::{
    admin, cgroup,
    executor::SandboxSpec,
    lab::Lab,
    sandbox::{Process, Sandbox},
    wait,
};

use super::{
    DNS, SharedParts,
    components::Components,
    control_groups,
    kubectl::Kubectl,
    network::{self, EDGE, NODES},
};

/// The time limit for the container runtime to start.
const RUNTIME_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for importing an image.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(120);

/// Directories that a node's daemons and Culvert's pods use. Each node mounts its own directories over them.
const NODE_DIRECTORIES: [&str; 7] = [
    "/etc/culvert",
    "/run/containerd",
    "/var/lib/cni",
    "/var/lib/culvert",
    "/var/lib/culvert-agent",
    "/var/lib/kubelet",
    "/var/log/containers",
];

/// The name of the cgroup over which each node mounts its own. All nodes share one Culvert configuration, so
/// each node's cgroup must be at the same path.
const SHARED_CGROUP: &str = "own";

/// A shell script that sets the host name to its first argument and runs the remaining arguments as a
/// command. Pods in the host's network get this host name.
const RUN_WITH_HOST_NAME: &str = "echo \"$0\" > /proc/sys/kernel/hostname; exec \"$@\"";

/// Creates those of [`NODE_DIRECTORIES`] that don't exist on the local machine, for use as mount points.
pub(super) fn prepare(lab: &Lab) -> Result<()> {
    NODE_DIRECTORIES
        .into_iter()
        .try_for_each(|directory| lab.create_external_directory(Path::new(directory)))
}

/// A node. Its processes are killed on drop.
#[derive(Debug)]
pub struct Node {
    /// The name of the Node object.
    pub name: &'static str,
    /// The name of the node's cgroup.
    group: &'static str,
    /// The node's index in [`NODES`].
    number: usize,
    /// The network namespace and cgroup that the node's daemons run in.
    pub host: Sandbox,
    /// The directory for the node's files.
    directory: PathBuf,
    /// The path of the node's cgroup, relative to the root of each hierarchy.
    relative_cgroup: String,
    /// The v2 cgroup that contains all of the node's processes, both daemons and pods.
    pub cgroup: PathBuf,
    /// The path at which every node mounts its own cgroup.
    pub(super) shared_cgroup_path: PathBuf,
    components: Components,
    daemons: Vec<Process>,
}

impl Node {
    /// Starts the node's container runtime, and imports all images.
    pub(super) fn start(shared: &SharedParts, number: usize, host: &Sandbox) -> Result<Self> {
        let (name, group) = NODES[number];
        let directory = shared.lab.directory().join(group);
        fs::create_dir_all(&directory)?;
        let mut node = Self {
            name,
            group,
            number,
            host: host.clone(),
            directory,
            relative_cgroup: control_groups::create(&shared.lab, group)?,
            cgroup: shared.lab.cgroup().join(group),
            shared_cgroup_path: shared.lab.cgroup().join(SHARED_CGROUP),
            components: shared.components.clone(),
            daemons: Vec::new(),
        };
        node.mount_own_directories()?;
        node.write("containerd.toml", &node.runtime_config(shared))?;
        node.write("cni/10-pods.conflist", &node.cni_config())?;
        let config = node.path("containerd.toml");
        node.run_daemon(shared, "containerd", &["containerd", "--config", &config])?;
        let version = node.runtime_client(&["version"]);
        wait::until(RUNTIME_TIMEOUT, || node.host.run(&version).is_ok())
            .with_context(|| format!("the container runtime of {name} did not start"))?;
        for image in shared.components.images()? {
            node.import(&image)?;
        }
        Ok(node)
    }

    /// Mounts the node's own directories over [`NODE_DIRECTORIES`], and its cgroup over the shared one.
    fn mount_own_directories(&self) -> Result<()> {
        // Pods' volumes may require mount propagation from the host.
        self.host.run(&["mount", "--make-rshared", "/"])?;
        for directory in NODE_DIRECTORIES {
            let own = self.own_directory(directory);
            fs::create_dir_all(&own)?;
            let own = own.display().to_string();
            self.host.run(&["mount", "--bind", &own, directory])?;
        }
        cgroup::create(&self.shared_cgroup_path)?;
        let own = self.cgroup.display().to_string();
        let mount_point = self.shared_cgroup_path.display().to_string();
        self.host
            .run(&["mount", "--bind", &own, &mount_point])
            .map(drop)
    }

    /// Returns the node's own directory, which is mounted over the given one.
    pub(super) fn own_directory(&self, directory: &str) -> PathBuf {
        let name = directory.trim_start_matches('/').replace('/', "-");
        self.directory.join("own").join(name)
    }

    /// Imports an image archive into the container runtime.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let archive = archive.display().to_string();
        let import = "--namespace k8s.io images import --snapshotter overlayfs";
        let arguments: Vec<_> = import.split(' ').chain([&*archive]).collect();
        let command = self.runtime_client(&arguments);
        let process = self.host.command(&command).start()?;
        let output = process.finish(IMPORT_TIMEOUT)?;
        let (name, stderr) = (self.name, output.stderr.trim());
        ensure!(
            output.exit.is_success(),
            "the container runtime of {name} cannot import {archive}: {stderr}"
        );
        Ok(())
    }

    /// Starts the kubelet, which registers the node.
    pub(super) fn start_kubelet(&mut self, shared: &SharedParts) -> Result<()> {
        self.write("resolv.conf", "nameserver 127.0.0.1\n")?;
        self.write("kubelet.yaml", &self.kubelet_config(shared))?;
        let [own4, own6] = network::addresses(self.number);
        let mut labels = format!("topology.kubernetes.io/zone=zone-{}", self.group);
        if self.is_edge() {
            labels.push_str(",openyurt.io/is-edge-worker=true");
        }
        let user = format!("{}.kubeconfig", self.name);
        let command = [
            shared.components.program("kubelet"),
            format!("--kubeconfig={}", shared.pki.file(&user)),
            format!("--config={}", self.path("kubelet.yaml")),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={own4},{own6}"),
            format!("--node-labels={labels}"),
            format!("--root-dir={}", self.path("kubelet")),
            format!("--cert-dir={}", self.path("pki")),
        ];
        self.run_daemon(shared, "kubelet", &command)
    }

    /// Starts a program that runs until the node is dropped.
    pub(super) fn run_daemon<A: AsRef<str>>(
        &mut self,
        shared: &SharedParts,
        name: &str,
        argv: &[A],
    ) -> Result<()> {
        let wrapper = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            RUN_WITH_HOST_NAME,
            self.name,
        ];
        let mut command = self.components.command(&wrapper);
        command.extend(argv.iter().map(|argument| argument.as_ref().to_owned()));
        let log = shared.logs.create(&format!("{name}-{}", self.group))?;
        self.daemons
            .push(self.host.command(&command).log(log).start()?);
        Ok(())
    }

    /// Returns true if this is the edge node.
    #[must_use]
    pub const fn is_edge(&self) -> bool {
        self.number == EDGE
    }

    /// Returns the path by which a process outside the node can access a path in the node's mount namespace.
    #[must_use]
    pub fn path_from_outside(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.host.pid()));
        root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns Culvert's state directory on this node.
    #[must_use]
    pub fn state_directory(&self) -> PathBuf {
        self.own_directory("/var/lib/culvert")
    }

    /// Returns the state directory of Culvert's agent on this node.
    #[must_use]
    pub fn agent_state_directory(&self) -> PathBuf {
        self.own_directory("/var/lib/culvert-agent")
    }

    /// Sends a GET request for a path to Culvert's admin socket on this node.
    pub fn get_from_daemon(&self, path: &str) -> Result<admin::Response> {
        admin::get(&self.state_directory().join("admin.sock"), path)
    }

    /// Kills this node's processes that run the given program with the given first argument.
    pub fn kill(&self, program: &str, argument: &str) -> Result<()> {
        let mut killed = 0;
        for pid in cgroup::processes_below(&self.cgroup)? {
            let cmdline = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut arguments = cmdline.split(|byte| *byte == 0);
            let path = arguments.next().unwrap_or_default();
            let is_program = path.rsplit(|byte| *byte == b'/').next() == Some(program.as_bytes());
            if is_program && arguments.next() == Some(argument.as_bytes()) {
                kill(pid, Signal::SIGKILL)?;
                killed += 1;
            }
        }
        ensure!(
            killed > 0,
            "no process `{program} {argument}` runs on {}",
            self.name
        );
        Ok(())
    }

    /// Creates a sandbox in a pod's network namespace and cgroup.
    pub fn pod_sandbox(&self, kubectl: &Kubectl, namespace: &str, name: &str) -> Result<Sandbox> {
        let path = "jsonpath={.metadata.uid}";
        let uid = kubectl.run(&["-n", namespace, "get", "pod", name, "-o", path])?;
        let group = find_directory(&self.cgroup.join("kubepods"), &format!("pod{uid}"))
            .with_context(|| format!("the pod {name} has no control group on {}", self.name))?;
        let (cgroup, pid) = find_process(&group)?
            .with_context(|| format!("the pod {name} has no process on {}", self.name))?;
        Sandbox::new(&SandboxSpec {
            network_of: Some(pid),
            user: None,
            cgroup,
            bpffs: None,
        })
    }

    /// Returns a command that a user can type to enter the node.
    #[must_use]
    pub fn shell_command(&self) -> String {
        format!(
            "sh -c 'echo $$ > {}/node/cgroup.procs; exec nsenter -t {} -n -m sh'",
            self.cgroup.display(),
            self.host.pid()
        )
    }

    /// Returns the path of a file in the node's directory.
    pub(super) fn path(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    /// Writes a file to the node's directory.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn runtime_client(&self, arguments: &[&str]) -> Vec<String> {
        let socket = self.path("containerd.sock");
        let client = ["ctr", "--address", &socket];
        self.components.command(&[&client, arguments].concat())
    }

    fn runtime_config(&self, shared: &SharedParts) -> String {
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        let runc = format!("{cri}.containerd.runtimes.runc");
        // `restrict_oom_score_adj` is set because in some environments, not even root may lower a process's
        // OOM score. Without this option, the runtime could not start any containers there.
        format!(
            "version = 2\n\
             root = \"{root}\"\n\
             state = \"{state}\"\n\
             [grpc]\n  address = \"{socket}\"\n\
             [plugins.\"io.containerd.internal.v1.opt\"]\n  path = \"{opt}\"\n\
             [{cri}]\n\
             \x20 sandbox_image = \"culvert.test/pause:1\"\n\
             \x20 restrict_oom_score_adj = true\n\
             \x20 netns_mounts_under_state_dir = true\n\
             [{cri}.containerd]\n\
             \x20 snapshotter = \"overlayfs\"\n\
             \x20 default_runtime_name = \"runc\"\n\
             [{runc}]\n  runtime_type = \"io.containerd.runc.v2\"\n\
             [{runc}.options]\n  SystemdCgroup = false\n\
             [{cri}.cni]\n  bin_dir = \"{plugins}\"\n  conf_dir = \"{network}\"\n",
            root = self.path("containerd"),
            state = self.path("containerd-state"),
            socket = self.path("containerd.sock"),
            opt = self.path("opt"),
            plugins = shared.components.network_plugins().display(),
            network = self.path("cni"),
        )
    }

    /// Returns the CNI configuration, which connects the pods to a bridge. No masquerading is needed, since
    /// the router has routes to the pods.
    fn cni_config(&self) -> String {
        let [pods4, pods6] = network::pod_ranges(self.number);
        format!(
            r#"{{"cniVersion": "0.4.0", "name": "pods", "plugins": [
  {{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
    "ipam": {{"type": "host-local", "dataDir": "{data}",
      "ranges": [[{{"subnet": "{pods4}"}}], [{{"subnet": "{pods6}"}}]],
      "routes": [{{"dst": "0.0.0.0/0"}}, {{"dst": "::/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}, "snat": true}}
]}}
"#,
            data = self.path("addresses"),
        )
    }

    /// Returns the kubelet's configuration. It disables image garbage collection, since deleted images can't
    /// be pulled again, and updates the contents of volumes more often than every minute.
    fn kubelet_config(&self, shared: &SharedParts) -> String {
        let Self {
            name,
            relative_cgroup,
            ..
        } = self;
        let pki = |file: &str| shared.pki.file(file);
        format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1\n\
             kind: KubeletConfiguration\n\
             address: 0.0.0.0\n\
             authentication:\n\
             \x20 anonymous: {{enabled: false}}\n\
             \x20 webhook: {{enabled: true}}\n\
             \x20 x509: {{clientCAFile: {ca}}}\n\
             authorization: {{mode: Webhook}}\n\
             tlsCertFile: {cert}\n\
             tlsPrivateKeyFile: {key}\n\
             containerRuntimeEndpoint: unix://{socket}\n\
             cgroupDriver: cgroupfs\n\
             cgroupRoot: {relative_cgroup}\n\
             failCgroupV1: false\n\
             failSwapOn: false\n\
             clusterDNS: [{DNS}]\n\
             clusterDomain: cluster.local\n\
             resolvConf: {resolver}\n\
             volumePluginDir: {volumes}\n\
             podLogsDir: {logs}\n\
             evictionHard: {{memory.available: 100Mi}}\n\
             imageGCHighThresholdPercent: 100\n\
             imageGCLowThresholdPercent: 99\n\
             imageMinimumGCAge: 24h\n\
             enforceNodeAllocatable: [pods]\n\
             nodeStatusUpdateFrequency: 5s\n\
             syncFrequency: 10s\n",
            ca = pki("ca.crt"),
            cert = pki(&format!("kubelet-{name}.crt")),
            key = pki(&format!("kubelet-{name}.key")),
            socket = self.path("containerd.sock"),
            resolver = self.path("resolv.conf"),
            volumes = self.path("volume-plugins"),
            logs = shared.logs.path(&format!("pods-{}", self.group)).display(),
        )
    }
}

/// Finds a directory with the given name anywhere below another directory.
fn find_directory(directory: &Path, name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(directory).ok()?.flatten();
    let mut directories = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir());
    directories.find_map(|path| {
        if path.file_name().is_some_and(|file| file == name) {
            return Some(path);
        }
        find_directory(&path, name)
    })
}

/// Finds a process in a child of a cgroup; returns the child and the process ID.
fn find_process(group: &Path) -> Result<Option<(PathBuf, u32)>> {
    for entry in fs::read_dir(group)? {
        let path = entry?.path();
        let Ok(processes) = fs::read_to_string(path.join("cgroup.procs")) else {
            continue;
        };
        if let Some(pid) = processes.lines().find_map(|line| line.parse().ok()) {
            return Ok(Some((path, pid)));
        }
    }
    Ok(None)
}
