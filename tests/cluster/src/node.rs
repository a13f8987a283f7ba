//! A node: its container runtime and its kubelet.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use tunnel_tests::{
    admin,
    agent::Ground,
    cgroup,
    lab::Lab,
    place::{Place, Process},
    wait,
};

use super::{
    DNS, Site, control_groups,
    kit::Kit,
    kubectl::Kubectl,
    network::{self, EDGE, NODES},
};

/// The time limits of the runtime's start, and of the import of an image.
const RUNTIME: Duration = Duration::from_secs(60);
const IMPORT: Duration = Duration::from_secs(120);

/// Folders of daemons and of the product's pods; each node mounts its own folders there.
const OWN: [&str; 7] = [
    "/etc/culvert",
    "/run/containerd",
    "/var/lib/cni",
    "/var/lib/culvert",
    "/var/lib/culvert-agent",
    "/var/lib/kubelet",
    "/var/log/containers",
];

/// The control group path at which each node mounts its own group, so that all nodes can share one
/// config.
const SHOWN: &str = "own";

/// Sets the host name of a program's UTS namespace to the name of its node; pods in the host's network
/// show it.
const NAMED: &str = "echo \"$0\" > /proc/sys/kernel/hostname; exec \"$@\"";

/// Creates the folders of `OWN` as mount points, where the machine lacks them.
pub(super) fn prepare(lab: &Lab) -> Result<()> {
    OWN.into_iter()
        .try_for_each(|folder| lab.folder_elsewhere(Path::new(folder)))
}

/// A node; its processes end on drop.
#[derive(Debug)]
pub struct Node {
    /// The name of the node in the cluster.
    pub name: &'static str,
    group: &'static str,
    number: usize,
    /// The node's host: the network namespace and the control group of its daemons.
    pub host: Place,
    folder: PathBuf,
    /// The node's control group, relative to each hierarchy.
    cgroup: String,
    /// The control group (version 2) of all processes on the node, in pods and daemons.
    pub unified: PathBuf,
    /// The path at which every node, also this one, mounts its own control group.
    pub(super) shown: PathBuf,
    kit: Kit,
    daemons: Vec<Process>,
}

impl Node {
    /// Starts the container runtime, and imports all images.
    pub(super) fn start(site: &Site, number: usize, host: &Place) -> Result<Self> {
        let (name, group) = NODES[number];
        let folder = site.lab.folder().join(group);
        fs::create_dir_all(&folder)?;
        let mut node = Self {
            name,
            group,
            number,
            host: host.clone(),
            folder,
            cgroup: control_groups::make(&site.lab, group)?,
            unified: site.lab.cgroup().join(group),
            shown: site.lab.cgroup().join(SHOWN),
            kit: site.kit.clone(),
            daemons: Vec::new(),
        };
        node.set_apart()?;
        node.write("containerd.toml", &node.runtime_config(site))?;
        node.write("cni/10-pods.conflist", &node.pods_config())?;
        let config = node.path("containerd.toml");
        node.run_daemon(site, "containerd", &["containerd", "--config", &config])?;
        let version = node.runtime_client(&["version"]);
        wait::until(RUNTIME, || node.host.run(&version).is_ok())
            .with_context(|| format!("the container runtime of {name} doesn't answer"))?;
        for image in site.kit.images()? {
            node.import(&image)?;
        }
        Ok(node)
    }

    /// Mounts the node's own folders over the machine's.
    fn set_apart(&self) -> Result<()> {
        // Volumes of pods may require mount propagation from the host.
        self.host.run(&["mount", "--make-rshared", "/"])?;
        for folder in OWN {
            let own = self.own(folder);
            fs::create_dir_all(&own)?;
            let own = own.display().to_string();
            self.host.run(&["mount", "--bind", &own, folder])?;
        }
        cgroup::create(&self.shown)?;
        let (own, shown) = (self.unified.display(), self.shown.display());
        self.host
            .run(&["mount", "--bind", &own.to_string(), &shown.to_string()])
            .map(drop)
    }

    /// Returns the node's own folder that is mounted over a folder of the machine.
    pub(super) fn own(&self, folder: &str) -> PathBuf {
        let name = folder.trim_start_matches('/').replace('/', "-");
        self.folder.join("own").join(name)
    }

    /// Imports an image from an archive into the runtime.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let archive = archive.display().to_string();
        let import = "--namespace k8s.io images import --snapshotter overlayfs";
        let words: Vec<_> = import.split(' ').chain([&*archive]).collect();
        let command = self.runtime_client(&words);
        let output = self.host.command(&command).start()?.finish(IMPORT)?;
        let (name, why) = (self.name, output.stderr.trim());
        ensure!(
            output.exit.is_success(),
            "{name} can't take {archive} in: {why}"
        );
        Ok(())
    }

    /// Starts the kubelet, which joins the cluster.
    pub(super) fn start_kubelet(&mut self, site: &Site) -> Result<()> {
        self.write("resolv.conf", "nameserver 127.0.0.1\n")?;
        self.write("kubelet.yaml", &self.kubelet_config(site))?;
        let [own4, own6] = network::addresses(self.number);
        let mut labels = format!("topology.kubernetes.io/zone=zone-{}", self.group);
        if self.is_edge() {
            labels.push_str(",openyurt.io/is-edge-worker=true");
        }
        let user = format!("{}.kubeconfig", self.name);
        let command = [
            site.kit.program("kubelet"),
            format!("--kubeconfig={}", site.pki.file(&user)),
            format!("--config={}", self.path("kubelet.yaml")),
            format!("--hostname-override={}", self.name),
            format!("--node-ip={own4},{own6}"),
            format!("--node-labels={labels}"),
            format!("--root-dir={}", self.path("kubelet")),
            format!("--cert-dir={}", self.path("pki")),
        ];
        self.run_daemon(site, "kubelet", &command)
    }

    /// Starts a program that runs until the node is dropped.
    pub(super) fn run_daemon<A: AsRef<str>>(
        &mut self,
        site: &Site,
        name: &str,
        argv: &[A],
    ) -> Result<()> {
        let named = ["unshare", "--uts", "sh", "-c", NAMED, self.name];
        let mut command = self.kit.command(&named);
        command.extend(argv.iter().map(|word| word.as_ref().to_owned()));
        let log = site.logs.create(&format!("{name}-{}", self.group))?;
        self.daemons
            .push(self.host.command(&command).log(log).start()?);
        Ok(())
    }

    /// True for the edge node.
    #[must_use]
    pub const fn is_edge(&self) -> bool {
        self.number == EDGE
    }

    /// Returns the path of a node's file as seen from outside of the node.
    #[must_use]
    pub fn from_elsewhere(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.host.pid()));
        root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the product's state folder on this node.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.own("/var/lib/culvert")
    }

    /// Requests a path from the product's daemon on this node.
    pub fn ask_daemon(&self, path: &str) -> Result<admin::Answer> {
        admin::get(&self.state().join("admin.sock"), path)
    }

    /// Kills the processes of a program on this node whose first argument is this one.
    pub fn kill(&self, program: &str, argument: &str) -> Result<()> {
        let mut killed = 0;
        for pid in cgroup::processes_below(&self.unified)? {
            let said = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut words = said.split(|byte| *byte == 0);
            let first = words.next().unwrap_or_default();
            let is_program = first.rsplit(|byte| *byte == b'/').next() == Some(program.as_bytes());
            if is_program && words.next() == Some(argument.as_bytes()) {
                kill(pid, Signal::SIGKILL)?;
                killed += 1;
            }
        }
        ensure!(killed > 0, "no {program} {argument} runs on {}", self.name);
        Ok(())
    }

    /// Creates a place in the network namespace and the control group of a pod.
    pub fn pod(&self, kubectl: &Kubectl, namespace: &str, name: &str) -> Result<Place> {
        let path = "jsonpath={.metadata.uid}";
        let uid = kubectl.run(&["-n", namespace, "get", "pod", name, "-o", path])?;
        let folder = find(&self.unified.join("kubepods"), &format!("pod{uid}"))
            .with_context(|| format!("{name} has no control group on {}", self.name))?;
        let (cgroup, pid) = running(&folder)?
            .with_context(|| format!("nothing of {name} runs on {}", self.name))?;
        Place::new(&Ground {
            network_of: Some(pid),
            cgroup,
            bpffs: None,
        })
    }

    /// Returns the command line that enters the node from a shell.
    #[must_use]
    pub fn way_in(&self) -> String {
        format!(
            "sh -c 'echo $$ > {}/node/cgroup.procs; exec nsenter -t {} -n -m sh'",
            self.unified.display(),
            self.host.pid()
        )
    }

    /// Returns the path of a file in the node's folder.
    pub(super) fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// Writes a file in the node's folder.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.folder.join(name);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn runtime_client(&self, words: &[&str]) -> Vec<String> {
        let socket = self.path("containerd.sock");
        let client = ["ctr", "--address", &socket];
        self.kit.command(&[&client, words].concat())
    }

    fn runtime_config(&self, site: &Site) -> String {
        let cri = "plugins.\"io.containerd.grpc.v1.cri\"";
        let runc = format!("{cri}.containerd.runtimes.runc");
        // In some environments root may not lower the score of the out-of-memory killer; without this
        // option the runtime then starts no container.
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
            plugins = site.kit.network_plugins().display(),
            network = self.path("cni"),
        )
    }

    /// Returns the config of a bridge for the pods. Nothing is masqueraded: the router has routes to the
    /// ranges of pods.
    fn pods_config(&self) -> String {
        let [pods4, pods6] = network::pods(self.number);
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

    /// Returns the kubelet's config. Images can't be pulled again, so garbage collection of images is
    /// off.
    fn kubelet_config(&self, site: &Site) -> String {
        let Self { name, cgroup, .. } = self;
        let pki = |file: &str| site.pki.file(file);
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
             cgroupRoot: {cgroup}\n\
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
             nodeStatusUpdateFrequency: 5s\n",
            ca = pki("ca.crt"),
            cert = pki(&format!("kubelet-{name}.crt")),
            key = pki(&format!("kubelet-{name}.key")),
            socket = self.path("containerd.sock"),
            resolver = self.path("resolv.conf"),
            volumes = self.path("volume-plugins"),
            logs = site.logs.path(&format!("pods-{}", self.group)).display(),
        )
    }
}

/// Finds the folder of this name below another one.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let mut folders = entries.map(|it| it.path()).filter(|path| path.is_dir());
    folders.find_map(|path| {
        if path.file_name().is_some_and(|it| it == name) {
            return Some(path);
        }
        find(&path, name)
    })
}

/// Finds a control group below another one with a process in it; returns the group and the process.
fn running(folder: &Path) -> Result<Option<(PathBuf, u32)>> {
    for entry in fs::read_dir(folder)? {
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
