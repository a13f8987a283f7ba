//! Refusals on kernels without `bpf_set_retval` (before Linux 6.1): the programs rewrite the destination to
//! an address that refuses connects. These tests load the variant of the programs that the daemon loads
//! on old kernels.

use std::{net::UdpSocket, ops::Deref};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use socket2::Socket;
use tunnel_tests::{
    place::{ANSWER, connect_within},
    shared::{Fixture, Shared},
    wait,
};
use tunnel_userspace::{
    bpf::{self, Features, RcuGrace},
    source::file,
};

use crate::{
    programs::Programs,
    scene::{EMPTY, Scene, WEB},
    support::{DNS, HTTP, Way, ask, errno, same},
};

/// A node whose data path the test has loaded, without a daemon.
struct Loaded {
    scene: Scene,
    _programs: Programs,
}

impl Loaded {
    fn new() -> Result<Self> {
        let features = Features {
            set_retval: false,
            ..bpf::probe()?
        };
        let scene = Scene::leading_to(&["backend"], &["backend"])?;
        let node = &scene.node;
        node.apply(EMPTY.service("empty"))?;
        let (programs, maps) = Programs::load(node, features, 64)?;
        let mut reconciler = programs.reconciler(maps, &RcuGrace::new()?)?;
        let (update, problems) = file::read(&node.manifests())?;
        ensure!(problems.is_empty(), "{problems:?}");
        reconciler.update(update);
        reconciler.pass();
        programs.attach(node)?;
        Ok(Self {
            scene,
            _programs: programs,
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

static REWRITING: Shared<Loaded> = Shared::new(Loaded::new);

#[test]
fn programs_that_rewrite_what_they_refuse_translate() -> Result<()> {
    let scene = REWRITING.take()?;
    scene.reaches(WEB, "backend")?;
    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        way.is_answered(&socket, WEB, DNS, "backend")?;
        socket.connect(way.to(WEB, DNS))?;
        same("server", ask(&socket)?, "backend")
    })?;
    scene.give_back()
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
        same("error", errno::<()>(Err(failed)), Errno::ECONNREFUSED)
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_connected_udp_socket_hears_of_the_refusal_and_a_datagram_is_not_permitted()
-> Result<()> {
    let scene = REWRITING.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.connected(place, EMPTY, DNS)?;
        socket.send(b"who?")?;
        let heard = errno(socket.recv(&mut [0; 16]));
        same("heard", heard, Errno::ECONNREFUSED)?;
        same("peer", socket.peer_addr()?, way.shown(EMPTY, DNS))?;
        let sent = way.udp(place)?.send_to(b"who?", way.to(EMPTY, DNS));
        same("sent", errno(sent), Errno::EPERM)
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_socket_bound_to_a_device_is_refused_all_the_same() -> Result<()> {
    let scene = REWRITING.take()?;

    for (device, place) in scene.devices() {
        for way in Way::TCP {
            let socket = way.tcp(place)?;
            socket.bind_device(Some(device.as_bytes()))?;
            let refused = errno(connect_within(&socket, way.to(EMPTY, HTTP), ANSWER));
            same(&format!("{way:?} by {device}"), refused, Errno::ENETUNREACH)?;
        }
        for way in Way::UDP {
            let socket = Socket::from(way.udp(place)?);
            socket.bind_device(Some(device.as_bytes()))?;
            let (socket, to) = (UdpSocket::from(socket), way.to(EMPTY, DNS));
            let refused = [socket.connect(to), socket.send_to(b"who?", to).map(drop)];
            same(
                &format!("{way:?} by {device}"),
                refused.map(errno),
                [Errno::EPERM; 2],
            )?;
        }
    }
    scene.give_back()
}
