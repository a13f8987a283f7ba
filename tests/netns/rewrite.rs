//! Refusing on kernels without `bpf_set_retval` (before Linux 6.1): the destination is rewritten
//! to one that refuses. The data path is loaded here, in that variant, as the daemon would there.

use std::{net::UdpSocket, ops::Deref, time::Duration};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use socket2::Socket;
use tunnel_tests::{
    feature::{self, Feature},
    place::{ANSWER, connect_within},
    shared::{Fixture, Shared},
    test_name, wait,
};
use tunnel_userspace::{
    bpf::{self, DataPath, Features, Pins, RcuGrace, Switches},
    model::{Algorithm, ExternalIps, TopologyKeys},
    reconcile::{Reconciler, Settings, Sizes},
    source::file,
};

use crate::{
    scene::{EMPTY, Scene, WEB},
    support::{DNS, HTTP, Way, ask, errno, same},
};

/// A node whose data path was loaded without the daemon.
struct Loaded {
    scene: Scene,
    _data_path: DataPath,
}

impl Loaded {
    fn new(set_retval: bool) -> Result<Self> {
        let features = Features {
            set_retval,
            ..bpf::probe()?
        };
        let scene = Scene::new(&["backend"])?;
        let node = &scene.node;
        node.apply(WEB.service("web").backends(scene.all()))?;
        node.apply(EMPTY.service("empty"))?;
        let sizes = Sizes {
            fronts: 16,
            slots: 16,
            backends: 16,
            ..Sizes::each(64)
        };
        let pins = Pins::hold(&node.bpffs())?;
        let data_path =
            DataPath::load(&pins, sizes, features, &Switches::default(), Duration::ZERO)?;
        let (maps, _counters) = data_path.open_maps()?;
        let settings = Settings {
            node_name: tunnel_tests::instance::NODE.to_owned(),
            algorithm: Algorithm::Random,
            node_ports: Vec::new(),
            external_ips: ExternalIps::Any,
            topology_keys: TopologyKeys::Ignore,
        };
        let mut reconciler = Reconciler::adopt(maps, sizes, &RcuGrace::new()?, settings)?;
        let (update, problems) = file::read(&node.manifests())?;
        ensure!(problems.is_empty(), "{problems:?}");
        reconciler.update(update);
        reconciler.pass();
        data_path.attach(&node.instance_cgroup())?.pin()?;
        Ok(Self {
            scene,
            _data_path: data_path,
        })
    }
}

impl Deref for Loaded {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.scene
    }
}

impl Fixture for Loaded {}

static REWRITING: Shared<Loaded> = Shared::new(|| Loaded::new(false));

#[test]
fn programs_that_rewrite_what_they_refuse_translate() -> Result<()> {
    let scene = REWRITING.take()?;
    translates(&scene)?;
    scene.give_back()
}

#[test]
fn programs_that_set_an_error_translate() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SetRetval])? {
        return Ok(());
    }
    translates(&*Loaded::new(true)?)
}

fn translates(scene: &Scene) -> Result<()> {
    scene.reaches(WEB, "backend")?;
    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        way.is_answered(&socket, WEB, DNS, "backend")?;
        socket.connect(way.to(WEB, DNS))?;
        same("server", ask(&socket)?, "backend")
    })
}

#[test]
fn without_set_retval_a_tcp_connect_is_refused_by_loopback() -> Result<()> {
    let scene = REWRITING.take()?;

    scene.each(&Way::TCP, |place, way| {
        let refused = way.connect(place, EMPTY, HTTP);
        same("error", errno(refused), Errno::ECONNREFUSED)?;

        let socket = way.tcp(place)?;
        socket.set_nonblocking(true)?;
        let begun = socket.connect(&way.to(EMPTY, HTTP).into());
        same("error", errno(begun), Errno::EINPROGRESS)?;
        let failed = wait::some(ANSWER, || socket.take_error().transpose())??;
        same(
            "error",
            failed.raw_os_error(),
            Some(Errno::ECONNREFUSED as i32),
        )
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_connected_udp_socket_hears_of_the_refusal() -> Result<()> {
    let scene = REWRITING.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        socket.connect(way.to(EMPTY, DNS))?;
        socket.send(b"who?")?;
        let mut answer = [0; 16];
        same(
            "error",
            errno(socket.recv(&mut answer)),
            Errno::ECONNREFUSED,
        )?;
        same("peer", socket.peer_addr()?, way.shown(EMPTY, DNS))
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_datagram_to_nobody_is_not_permitted() -> Result<()> {
    let scene = REWRITING.take()?;

    scene.each(&Way::UDP, |place, way| {
        let sent = way.udp(place)?.send_to(b"who?", way.to(EMPTY, DNS));
        same("error", errno(sent), Errno::EPERM)
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_socket_bound_to_a_device_is_refused_all_the_same() -> Result<()> {
    let scene = REWRITING.take()?;
    let [(_, host), (_, pod)] = scene.places();

    for (device, place) in [("uplink", host), ("eth0", pod)] {
        for way in Way::TCP {
            let socket = way.tcp(place)?;
            socket.bind_device(Some(device.as_bytes()))?;
            let refused = connect_within(&socket, way.to(EMPTY, HTTP), ANSWER);
            same(
                &format!("{way:?} by {device}"),
                errno(refused),
                Errno::ENETUNREACH,
            )?;
        }
        for way in Way::UDP {
            let socket = Socket::from(way.udp(place)?);
            socket.bind_device(Some(device.as_bytes()))?;
            let socket = UdpSocket::from(socket);
            let what = format!("{way:?} by {device}");
            same(
                &what,
                errno(socket.connect(way.to(EMPTY, DNS))),
                Errno::EPERM,
            )?;
            let sent = socket.send_to(b"who?", way.to(EMPTY, DNS));
            same(&what, errno(sent), Errno::EPERM)?;
        }
    }
    scene.give_back()
}
