//! The fixture that most tests use: a node with a client pod and server pods.

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::{IpAddr, UdpSocket},
    ops::Deref,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    culvert_instance::{Instance, InstanceSettings},
    manifest::{Manifest, Service},
    node::Node,
    pod::{Pod, Server},
    sandbox::Sandbox,
    shared_fixture::{Fixture, SharedFixture},
    wait,
};

use crate::support::{
    CHANGE_TIMEOUT, DNS, Dialer, HTTP, Vip, addresses, clients, ensure_eq, expect_ended, ports,
    query, serve, until_eq,
};

pub(crate) const WEB: Vip = Vip::of(10);
/// The VIP of a Service whose backend differs from that of [`WEB`].
pub(crate) const OTHER: Vip = Vip::of(11);
/// The VIP of a Service without a backend.
pub(crate) const EMPTY: Vip = Vip::of(12);
/// The VIP of a Service with the same backend and port as [`WEB`].
pub(crate) const TWIN: Vip = Vip::of(13);

/// A shared node with a Service at each of the VIPs [`WEB`], [`TWIN`], [`OTHER`] and [`EMPTY`], for tests
/// that only dial these Services. Its server pods are `backend` and `other`.
pub(crate) static DIALLED: SharedFixture<Scene> = SharedFixture::new(|| {
    let scene = Scene::new(&["backend", "other"])?;
    let to = |name| scene.addresses(&[name]);
    scene.start([
        WEB.service("web").backends(to("backend")?),
        TWIN.service("twin").backends(to("backend")?),
        OTHER.service("other").backends(to("other")?),
        EMPTY.service("empty"),
    ])?;
    scene.record_manifests()
});

/// A node with a client pod named `client`, and server pods that serve the target ports of [`Vip::service`].
pub(crate) struct Scene {
    pub(crate) node: Node,
    pub(crate) client: Arc<Pod>,
    backends: Vec<Backend>,
    /// The manifests that existed before a test, by file name. The test must leave exactly these behind.
    manifests: BTreeMap<String, String>,
}

/// A pod that runs a server.
pub(crate) struct Backend {
    pod: Arc<Pod>,
    pub(crate) server: Server,
}

impl Deref for Backend {
    type Target = Pod;

    fn deref(&self) -> &Pod {
        &self.pod
    }
}

impl Scene {
    /// Creates a node with server pods of the given names, but does not start the daemon.
    pub(crate) fn new(backends: &[&str]) -> Result<Self> {
        Self::with(backends, |_| {})
    }

    /// Creates a node like [`Scene::new`], but with settings that `change` has modified.
    pub(crate) fn with(
        backends: &[&str],
        change: impl FnOnce(&mut InstanceSettings),
    ) -> Result<Self> {
        let mut settings = InstanceSettings::from_environment()?;
        change(&mut settings);
        let node = Node::with_settings(settings)?;
        let client = node.pod("client")?;
        let backend = |name: &&str| {
            let pod = node.pod(name)?;
            let server = serve(&pod)?;
            Ok(Backend { pod, server })
        };
        let backends = backends.iter().map(backend).collect::<Result<_>>()?;
        Ok(Self {
            node,
            client,
            backends,
            manifests: BTreeMap::new(),
        })
    }

    /// Creates a node with the given server pods, all of which are backends of the Service `web` at [`WEB`],
    /// and starts the daemon.
    pub(crate) fn web(backends: &[&str]) -> Result<Self> {
        let scene = Self::prepare_web(backends, backends)?;
        scene.node.start()?;
        Ok(scene)
    }

    /// Creates a node with the server pods `backends`, of which only `some` are backends of the Service `web`
    /// at [`WEB`], but does not start the daemon.
    pub(crate) fn prepare_web(backends: &[&str], some: &[&str]) -> Result<Self> {
        let scene = Self::new(backends)?;
        scene.apply_web(some)?;
        Ok(scene)
    }

    /// Applies the Service `web` with the named backends.
    pub(crate) fn apply_web(&self, backends: &[&str]) -> Result<()> {
        self.apply_service(WEB, "web", backends)
    }

    /// Applies a Service with the named backends.
    pub(crate) fn apply_service(&self, vip: Vip, name: &str, backends: &[&str]) -> Result<()> {
        let backends = self.addresses(backends)?;
        self.node.apply(vip.service(name).backends(backends))
    }

    /// Creates a node without Services and starts the daemon; tests apply their own Services.
    pub(crate) fn started(backends: &[&str]) -> Result<Self> {
        let scene = Self::new(backends)?;
        scene.node.start()?;
        scene.record_manifests()
    }

    /// Records the current manifests as the state that must be restored after each test.
    pub(crate) fn record_manifests(mut self) -> Result<Self> {
        self.manifests = self.read_manifests()?;
        Ok(self)
    }

    /// Applies the given Services and starts the daemon.
    pub(crate) fn start(&self, services: impl IntoIterator<Item = Service>) -> Result<()> {
        for service in services {
            self.node.apply(service)?;
        }
        self.node.start()
    }

    /// Applies a new Service to the running daemon, and waits until all of its ports are programmed.
    pub(crate) fn program(&self, service: Service) -> Result<()> {
        let manifest = Manifest::from(service);
        let name = manifest.file.trim_end_matches(".yaml").to_owned();
        self.node.apply(manifest)?;
        let has_fronts = |port: &serde_json::Value| {
            port["frontends"]
                .as_array()
                .is_some_and(|it| !it.is_empty())
        };
        wait::until(CHANGE_TIMEOUT, || {
            let services = self.node.services().unwrap_or_default();
            let ports = ports(&services, &name);
            !ports.is_empty() && ports.iter().all(has_fronts)
        })
        .with_context(|| format!("{name} isn't programmed: {:?}", self.node.services()))
    }

    /// Adds a field to the section `bpf` of the config. The daemon reads the config when it next starts.
    pub(crate) fn configure_bpf(&self, field: &str) -> Result<()> {
        let path = self.node.config_path();
        let config = fs::read_to_string(&path)?;
        let config = config.replace("bpf:\n", &format!("bpf:\n  {field}\n"));
        fs::write(path, config).context("cannot write the config")
    }

    /// Returns the backend with the given name.
    pub(crate) fn backend(&self, name: &str) -> Result<&Backend> {
        let backend = self.backends.iter().find(|it| it.name() == name);
        backend.with_context(|| format!("no backend {name}"))
    }

    /// Returns the addresses of the named backends.
    pub(crate) fn addresses(&self, names: &[&str]) -> Result<Vec<IpAddr>> {
        let pods = names.iter().map(|name| self.backend(name));
        let pods: Vec<_> = pods.collect::<Result<_>>()?;
        Ok(addresses(&pods.iter().map(|it| &***it).collect::<Vec<_>>()))
    }

    /// Returns the addresses of all backends except the named one.
    pub(crate) fn addresses_without(&self, name: &str) -> Vec<IpAddr> {
        let others = self.backends.iter().filter(|it| it.name() != name);
        addresses(&others.map(|it| &**it).collect::<Vec<_>>())
    }

    /// Returns the addresses of all backends.
    pub(crate) fn all_addresses(&self) -> Vec<IpAddr> {
        self.addresses_without("")
    }

    /// Returns the host and the client pod, each with a name for error messages.
    pub(crate) fn sandboxes(&self) -> [(&'static str, &Sandbox); 2] {
        clients(self.node.host(), &self.client)
    }

    /// Returns the host and the client pod, each with the name of its network interface.
    pub(crate) fn devices(&self) -> [(&'static str, &Sandbox); 2] {
        [("uplink", self.node.host()), ("eth0", &self.client)]
    }

    /// Runs `check` on the host and in the client pod, once for each dialer.
    pub(crate) fn for_each_client(
        &self,
        dialers: &[Dialer],
        check: impl Fn(&Sandbox, Dialer) -> Result<()>,
    ) -> Result<()> {
        self.map_clients(dialers, check).map(drop)
    }

    /// Connects over TCP from the host and from the client pod with every dialer. The peer must be the
    /// dialled address, and the given server must answer.
    pub(crate) fn expect_served(&self, vip: Vip, server: &str) -> Result<()> {
        self.for_each_client(&Dialer::TCP, |sandbox, dialer| {
            dialer.expect_served(sandbox, vip, HTTP, server)
        })
    }

    /// Runs `open` on the host and in the client pod, once for each dialer, and collects the results.
    pub(crate) fn map_clients<T>(
        &self,
        dialers: &[Dialer],
        open: impl Fn(&Sandbox, Dialer) -> Result<T>,
    ) -> Result<Vec<(Client<'_>, T)>> {
        let mut all = Vec::new();
        for (from, sandbox) in self.sandboxes() {
            for dialer in dialers {
                let client = Client {
                    from,
                    sandbox,
                    dialer: *dialer,
                };
                let opened = open(sandbox, *dialer).with_context(|| client.to_string())?;
                all.push((client, opened));
            }
        }
        Ok(all)
    }

    /// Connects a UDP socket from the host and from the client pod with every dialer. The given server must
    /// reply on each socket.
    pub(crate) fn connect_udp_clients(
        &self,
        vip: Vip,
        server: &str,
    ) -> Result<Vec<(Client<'_>, UdpSocket)>> {
        self.map_clients(&Dialer::UDP, |sandbox, dialer| {
            dialer.connect_udp_to(sandbox, vip, DNS, server)
        })
    }

    /// Waits until the number of terminated sockets is exactly `count`.
    pub(crate) fn until_ended(&self, count: usize) -> Result<()> {
        until_eq("ended", u64::try_from(count)?, || {
            self.node.reason_count("socket_terminated")
        })
    }

    /// Returns the contents of all files in the manifest directory, by file name.
    fn read_manifests(&self) -> Result<BTreeMap<String, String>> {
        let read = |entry: std::io::Result<fs::DirEntry>| {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok((name.into_owned(), fs::read_to_string(&path)?))
        };
        fs::read_dir(self.node.manifests())?.map(read).collect()
    }
}

/// A dialer on the host or in the client pod.
#[derive(Clone, Copy)]
pub(crate) struct Client<'a> {
    from: &'static str,
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) dialer: Dialer,
}

impl fmt::Display for Client<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} from the {}", self.dialer, self.from)
    }
}

/// Waits until all of the given sockets have been terminated.
pub(crate) fn expect_all_ended(sockets: &[(Client<'_>, UdpSocket)]) -> Result<()> {
    let check = |(client, socket): &(Client<'_>, _)| {
        expect_ended(socket).with_context(|| client.to_string())
    };
    sockets.iter().try_for_each(check)
}

/// Sends a datagram on each of the connected sockets; the given server must reply to it.
pub(crate) fn expect_answers(sockets: &[(Client<'_>, UdpSocket)], server: &str) -> Result<()> {
    for (client, socket) in sockets {
        let answer = query(socket).and_then(|name| ensure_eq("server", name, server));
        answer.with_context(|| client.to_string())?;
    }
    Ok(())
}

impl Fixture for Scene {
    /// Deletes the manifests that the test added. The test must have left all others as they were.
    fn restore(&self) -> Result<()> {
        for (file, text) in self.read_manifests()? {
            match self.manifests.get(&file) {
                Some(before) => ensure_eq(&file, &text, before)?,
                None => self.node.delete(&file)?,
            }
        }
        ensure_eq("manifests", self.read_manifests()?, self.manifests.clone())?;
        let known = |name: &str| self.manifests.contains_key(&format!("{name}.yaml"));
        let is_known = |service: &serde_json::Value| service["name"].as_str().is_some_and(known);
        wait::until(CHANGE_TIMEOUT, || {
            let services = self.node.services().unwrap_or_default();
            let services = services.as_array();
            services.is_some_and(|all| all.iter().all(is_known))
        })
        .context("the status still lists Services that the test applied")
    }
}

/// Replaces the config's last section, `section`. The daemon reads the config when it next starts.
pub(crate) fn configure(instance: &Instance, section: &str, value: &str) -> Result<()> {
    let config = fs::read_to_string(instance.config_path())?;
    let rest = config.split(&format!("{section}:")).next();
    let config = format!("{}{section}: {value}\n", rest.unwrap_or_default());
    fs::write(instance.config_path(), config).context("cannot write the config")
}
