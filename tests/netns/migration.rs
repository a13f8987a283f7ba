//! Helpers for tests in which maps are replaced: open flows that must keep their backends, and the
//! directories that contain the pins.

use std::{
    cell::RefCell,
    fs,
    net::{TcpStream, UdpSocket},
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use aya::{
    maps::{PerCpuArray, PerCpuValues},
    util::nr_cpus,
};
use tunnel_common::{LAYOUT_VERSION, table::REASON_COUNTS};
use tunnel_tests::{load_scale::LoadScale, node::Node, pod::Pod, wait};

use crate::{
    fixture::{OTHER, Scene, WEB},
    support::{
        CHANGE_TIMEOUT, DNS, Dialer, HTTP, Vip, count_during, ensure_eq, http_server_name,
        maps_directory, query, query_to,
    },
};

/// The VIPs of the Services on the node that [`start`] creates, and the names of their backends.
pub(crate) const SERVICES: [(Vip, &[&str]); 2] = [(WEB, &["one", "two"]), (OTHER, &["other"])];

/// Starts a node with the two Services in [`SERVICES`], and a third one named `first`.
pub(crate) fn start() -> Result<Scene> {
    // All Services are in one namespace.
    let scene = Scene::with(&["one", "two", "other"], |settings| {
        settings.namespace_share = 100;
    })?;
    scene.resize([64, 64, 64])?;
    // This Service gets the first entries in the maps. Tests may delete it to leave a gap before the maps are
    // replaced.
    scene.apply_service(Vip::of(9), "first", &["other"])?;
    scene.apply_web(&["one", "two"])?;
    scene.apply_service(OTHER, "other", &["other"])?;
    scene.node.start()?;
    Ok(scene)
}

impl Scene {
    /// Sets the map sizes for frontends, slots and backends, which take effect when the daemon next starts.
    pub(crate) fn resize(&self, [frontends, slots, backends]: [u32; 3]) -> Result<()> {
        self.node.resize(|settings| {
            settings.maps.frontends = frontends;
            settings.maps.slots = slots;
            settings.maps.backends = backends;
        })
    }

    /// Returns true if the pin directory contains a pin or directory with the given name.
    pub(crate) fn has_pin(&self, pin: &str) -> bool {
        self.node.bpffs().join(pin).exists()
    }

    /// Asserts that the pin directory contains only the links and the maps with the current layout.
    pub(crate) fn expect_tidy(&self) -> Result<()> {
        ensure_eq(
            "directories",
            file_names(&self.node.bpffs())?,
            ["links", &maps_directory("")],
        )
    }

    /// Starts the daemon, and kills it as soon as `is_so` returns true or the daemon is live. Returns true if
    /// `is_so` returned true first.
    pub(crate) fn kill_when(&self, is_so: impl Fn(&Self) -> bool) -> Result<bool> {
        self.node.launch()?;
        let mut seen = false;
        wait::until_briefly(CHANGE_TIMEOUT, || {
            seen = is_so(self);
            seen || self.node.is_live()
        })?;
        self.node.kill9()?;
        Ok(seen)
    }

    /// Starts the daemon repeatedly under load, kills it at each of the given moments in turn, and runs
    /// `check` after each kill. Each of the first three moments must be reached at least once.
    pub(crate) fn kill_at_each(
        &self,
        moments: &[fn(&Self) -> bool],
        prepare: impl Fn(usize) -> Result<()>,
        check: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let rounds = usize::try_from(LoadScale::from_environment().count(2))? * moments.len();
        let seen = RefCell::new(vec![0; moments.len()]);
        self.under_load(&SERVICES, rounds, |number| {
            prepare(number)?;
            let moment = number % moments.len();
            let is_met = self.kill_when(moments[moment])?;
            seen.borrow_mut()[moment] += usize::from(is_met);
            check()
        })?;
        let seen = seen.into_inner();
        ensure!(seen[..3].iter().all(|count| *count > 0), "{seen:?}");
        Ok(())
    }
}

/// Returns the name of the directory for the previous layout's maps, followed by `rest`.
pub(crate) fn older_directory(rest: &str) -> String {
    format!("v{}{rest}", LAYOUT_VERSION - 1)
}

/// The number of entries in the previous layout's counter map.
const OLDER_COUNTERS: u32 = 64;

/// Makes a node's maps look like those with the previous layout: they are in that layout's directory, and the
/// counter map has fewer entries.
pub(crate) fn imitate_older_layout(node: &Node) -> Result<()> {
    let (own, older) = (maps_directory(""), older_directory(""));
    fs::rename(node.bpffs().join(&own), node.bpffs().join(&older))
        .with_context(|| format!("{own} to {older}"))?;
    let count = node.bpffs().join(&older).join(REASON_COUNTS.name);
    fs::remove_file(&count)?;
    let mut counters = PerCpuArray::<_, u64>::create(OLDER_COUNTERS, 0)?;
    let cpus = nr_cpus().map_err(|(_, error)| error)?;
    for reason in 0..OLDER_COUNTERS {
        counters.set(reason, PerCpuValues::try_from(vec![1000; cpus])?, 0)?;
    }
    counters.pin(&count)?;
    Ok(())
}

/// Returns the names of the files in a directory, sorted.
pub(crate) fn file_names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The flows that one dialer has opened.
pub(crate) struct Flows {
    dialer: Dialer,
    stream: TcpStream,
    connected: UdpSocket,
    connected_to: String,
    /// A socket that sends to each of the two Services in turn.
    unconnected: UdpSocket,
    sent_to: String,
}

impl Flows {
    pub(crate) fn open(client: &Pod) -> Result<Vec<Self>> {
        let dialers = [Dialer::V4, Dialer::V6, Dialer::Mapped];
        dialers
            .into_iter()
            .map(|dialer| Self::of(client, dialer))
            .collect()
    }

    fn of(client: &Pod, dialer: Dialer) -> Result<Self> {
        let connected = dialer.connect_udp(client, WEB, DNS)?;
        let unconnected = dialer.udp_socket(client)?;
        let (sent_to, _) = query_to(&unconnected, dialer.address(WEB, DNS))?;
        let flows = Self {
            dialer,
            stream: dialer.connect(client, WEB, HTTP)?,
            connected_to: query(&connected)?,
            connected,
            unconnected,
            sent_to,
        };
        flows.expect_kept()?;
        Ok(flows)
    }

    /// Asserts that all flows of this dialer keep their backends.
    pub(crate) fn expect_kept(&self) -> Result<()> {
        self.expect_connected_kept()?;
        for _ in 0..2 {
            ensure_eq("server", self.query(WEB)?, self.sent_to.clone())?;
            ensure_eq("server", self.query(OTHER)?, "other")?;
        }
        Ok(())
    }

    /// Asserts that the connected sockets keep their backends and still report the dialled address as their
    /// peer.
    pub(crate) fn expect_connected_kept(&self) -> Result<()> {
        let dialer = self.dialer;
        ensure_eq(
            "peer",
            self.stream.peer_addr()?,
            dialer.reported_address(WEB, HTTP),
        )?;
        ensure_eq(
            "peer",
            self.connected.peer_addr()?,
            dialer.reported_address(WEB, DNS),
        )?;
        ensure_eq("server", query(&self.connected)?, self.connected_to.clone())
    }

    /// Sends a datagram on the unconnected socket, and returns the name of the server that replies. The reply
    /// must come from the dialled address.
    pub(crate) fn query(&self, vip: Vip) -> Result<String> {
        let (server, sender) = query_to(&self.unconnected, self.dialer.address(vip, DNS))?;
        ensure_eq("sender", sender, self.dialer.reported_address(vip, DNS))?;
        Ok(server)
    }

    /// Makes an HTTP request over the TCP connection, then closes the connection.
    pub(crate) fn finish(self) -> Result<()> {
        let server = http_server_name(self.stream)?;
        ensure!(["one", "two"].contains(&&*server), "{server}");
        Ok(())
    }
}

/// Sends a datagram on each unconnected socket. Returns how many datagrams went to a newly chosen backend,
/// and how many to the backend stored with the socket.
pub(crate) fn count_choices(scene: &Scene, flows: &[Flows]) -> Result<Vec<u64>> {
    let send_all = || flows.iter().try_for_each(|flow| flow.query(WEB).map(drop));
    let reasons = ["translated", "translated_sticky"];
    count_during(&scene.node, &reasons, send_all).map(|((), increases)| increases)
}

/// Asserts that all flows keep their backends.
pub(crate) fn expect_all_kept(flows: &[Flows]) -> Result<()> {
    let check = |flow: &Flows| {
        flow.expect_kept()
            .with_context(|| format!("{:?}", flow.dialer))
    };
    flows.iter().try_for_each(check)
}
