//! The fixture of the tests here: a node, a pod that clients are in, and pods that serve.

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::{IpAddr, UdpSocket},
    ops::Deref,
    sync::Arc,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    instance::{Instance, Settings},
    manifest::{Manifest, Service},
    node::Node,
    place::Place,
    pod::{Pod, Server},
    shared::{Fixture, Shared},
    wait,
};

use crate::support::{
    CHANGE, DNS, HTTP, Vip, Way, addresses, ask, clients, is_ended, ports, same, serve, until_same,
};

pub(crate) const WEB: Vip = Vip::of(10);
/// Leads to another backend.
pub(crate) const OTHER: Vip = Vip::of(11);
/// Has no backend.
pub(crate) const EMPTY: Vip = Vip::of(12);
/// Leads to the same backend and port as [`WEB`].
pub(crate) const TWIN: Vip = Vip::of(13);

/// A node with these four Services, for tests that only dial them: `backend` and `other` serve.
pub(crate) static DIALLED: Shared<Scene> = Shared::new(|| {
    let scene = Scene::new(&["backend", "other"])?;
    let to = |name| scene.addresses(&[name]);
    scene.start([
        WEB.service("web").backends(to("backend")?),
        TWIN.service("twin").backends(to("backend")?),
        OTHER.service("other").backends(to("other")?),
        EMPTY.service("empty"),
    ])?;
    scene.freeze()
});

/// A node with the pod `client`, and pods that serve what [`Vip::service`] leads to.
pub(crate) struct Scene {
    pub(crate) node: Node,
    pub(crate) client: Arc<Pod>,
    backends: Vec<Backend>,
    /// The manifests that a test finds, and has to leave.
    manifests: BTreeMap<String, String>,
}

/// A pod that serves.
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
    /// A node with backends of these names; the daemon isn't started yet.
    pub(crate) fn new(backends: &[&str]) -> Result<Self> {
        Self::with(backends, |_| {})
    }

    /// The same, with other settings.
    pub(crate) fn with(backends: &[&str], change: impl FnOnce(&mut Settings)) -> Result<Self> {
        let mut settings = Settings::from_environment()?;
        change(&mut settings);
        let node = Node::with(settings)?;
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

    /// The Service `web` at [`WEB`] with all of these backends, programmed.
    pub(crate) fn web(backends: &[&str]) -> Result<Self> {
        let scene = Self::leading_to(backends, backends)?;
        scene.node.start()?;
        Ok(scene)
    }

    /// The Service `web` at [`WEB`] with some of these backends; the daemon isn't started yet.
    pub(crate) fn leading_to(backends: &[&str], some: &[&str]) -> Result<Self> {
        let scene = Self::new(backends)?;
        scene.lead_to(some)?;
        Ok(scene)
    }

    /// Applies the Service `web` with the backends of these names.
    pub(crate) fn lead_to(&self, backends: &[&str]) -> Result<()> {
        self.lead(WEB, "web", backends)
    }

    /// Applies a Service with the backends of these names.
    pub(crate) fn lead(&self, vip: Vip, name: &str, backends: &[&str]) -> Result<()> {
        let backends = self.addresses(backends)?;
        self.node.apply(vip.service(name).backends(backends))
    }

    /// A node without a Service, on which tests apply their own: the daemon runs.
    pub(crate) fn started(backends: &[&str]) -> Result<Self> {
        let scene = Self::new(backends)?;
        scene.node.start()?;
        scene.freeze()
    }

    /// Makes what is there now the state in which tests that share the scene leave it.
    pub(crate) fn freeze(mut self) -> Result<Self> {
        self.manifests = self.applied()?;
        Ok(self)
    }

    /// Applies Services and starts the daemon.
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
        let has_fronts =
            |port: &serde_json::Value| port["fronts"].as_array().is_some_and(|it| !it.is_empty());
        wait::until(CHANGE, || {
            let services = self.node.services().unwrap_or_default();
            let ports = ports(&services, &name);
            !ports.is_empty() && ports.iter().all(has_fronts)
        })
        .with_context(|| format!("{name} isn't programmed: {:?}", self.node.services()))
    }

    /// The backend of that name.
    pub(crate) fn backend(&self, name: &str) -> Result<&Backend> {
        let backend = self.backends.iter().find(|it| it.name() == name);
        backend.with_context(|| format!("no backend {name}"))
    }

    /// The addresses of the backends of these names.
    pub(crate) fn addresses(&self, names: &[&str]) -> Result<Vec<IpAddr>> {
        let pods = names.iter().map(|name| self.backend(name));
        let pods: Vec<_> = pods.collect::<Result<_>>()?;
        Ok(addresses(&pods.iter().map(|it| &***it).collect::<Vec<_>>()))
    }

    /// The addresses of all backends but the one of that name.
    pub(crate) fn without(&self, name: &str) -> Vec<IpAddr> {
        let others = self.backends.iter().filter(|it| it.name() != name);
        addresses(&others.map(|it| &**it).collect::<Vec<_>>())
    }

    /// The addresses of all backends.
    pub(crate) fn all(&self) -> Vec<IpAddr> {
        self.without("")
    }

    /// Each place from which Services are dialled alike.
    pub(crate) fn places(&self) -> [(&'static str, &Place); 2] {
        clients(self.node.host(), &self.client)
    }

    /// Each of these places with the name of its network interface.
    pub(crate) fn devices(&self) -> [(&'static str, &Place); 2] {
        [("uplink", self.node.host()), ("eth0", &self.client)]
    }

    /// Tells a story from each place in each of these ways.
    pub(crate) fn each(
        &self,
        ways: &[Way],
        story: impl Fn(&Place, Way) -> Result<()>,
    ) -> Result<()> {
        self.open(ways, story).map(drop)
    }

    /// Connects over TCP from each place in every way: the peer is shown as it was dialled, and this server
    /// answers.
    pub(crate) fn reaches(&self, vip: Vip, server: &str) -> Result<()> {
        self.each(&Way::TCP, |place, way| {
            way.is_served(place, vip, HTTP, server)
        })
    }

    /// Opens something from each place in each of these ways.
    pub(crate) fn open<T>(
        &self,
        ways: &[Way],
        open: impl Fn(&Place, Way) -> Result<T>,
    ) -> Result<Vec<(Client<'_>, T)>> {
        let mut all = Vec::new();
        for (from, place) in self.places() {
            for way in ways {
                let client = Client {
                    from,
                    place,
                    way: *way,
                };
                let opened = open(place, *way).with_context(|| client.to_string())?;
                all.push((client, opened));
            }
        }
        Ok(all)
    }

    /// Connected UDP sockets, in every way from each place, that this server has answered.
    pub(crate) fn connected(&self, vip: Vip, server: &str) -> Result<Vec<(Client<'_>, UdpSocket)>> {
        self.open(&Way::UDP, |place, way| way.asked(place, vip, DNS, server))
    }

    /// Waits until as many sockets were ended, and no more.
    pub(crate) fn until_ended(&self, count: usize) -> Result<()> {
        until_same("ended", u64::try_from(count)?, || {
            self.node.reason("socket_ended")
        })
    }

    /// The manifests in the folder, by their names.
    fn applied(&self) -> Result<BTreeMap<String, String>> {
        let read = |entry: std::io::Result<fs::DirEntry>| {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            Ok((name.into_owned(), fs::read_to_string(&path)?))
        };
        fs::read_dir(self.node.manifests())?.map(read).collect()
    }
}

/// A place and a way to dial from it.
#[derive(Clone, Copy)]
pub(crate) struct Client<'a> {
    from: &'static str,
    pub(crate) place: &'a Place,
    pub(crate) way: Way,
}

impl fmt::Display for Client<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} from the {}", self.way, self.from)
    }
}

/// Waits until each of these sockets is ended.
pub(crate) fn are_ended(sockets: &[(Client<'_>, UdpSocket)]) -> Result<()> {
    let is_ended =
        |(client, socket): &(Client<'_>, _)| is_ended(socket).with_context(|| client.to_string());
    sockets.iter().try_for_each(is_ended)
}

/// Asks on each of these connected sockets: this server answers.
pub(crate) fn are_answered(sockets: &[(Client<'_>, UdpSocket)], server: &str) -> Result<()> {
    for (client, socket) in sockets {
        let answer = ask(socket).and_then(|name| same("server", name, server));
        answer.with_context(|| client.to_string())?;
    }
    Ok(())
}

impl Fixture for Scene {
    /// Takes away what a test has applied; what was there before it must not have changed.
    fn restore(&self) -> Result<()> {
        for (file, text) in self.applied()? {
            match self.manifests.get(&file) {
                Some(before) => same(&file, &text, before)?,
                None => self.node.withdraw(&file)?,
            }
        }
        same("manifests", self.applied()?, self.manifests.clone())?;
        let known = |name: &str| self.manifests.contains_key(&format!("{name}.yaml"));
        let is_known = |service: &serde_json::Value| service["name"].as_str().is_some_and(known);
        wait::until(CHANGE, || {
            let services = self.node.services().unwrap_or_default();
            let services = services.as_array();
            services.is_some_and(|all| all.iter().all(is_known))
        })
        .context("what the test applied isn't gone")
    }
}

/// Writes the last section of the config anew, for the next start.
pub(crate) fn configure(instance: &Instance, section: &str, value: &str) -> Result<()> {
    let config = fs::read_to_string(instance.config_path())?;
    let rest = config.split(&format!("{section}:")).next();
    let config = format!("{}{section}: {value}\n", rest.unwrap_or_default());
    fs::write(instance.config_path(), config).context("cannot write the config")
}
