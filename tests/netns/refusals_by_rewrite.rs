//! Tests refusals on kernels without `bpf_set_retval` (before Linux 6.1): the programs rewrite the
//! destination to an address that refuses connections. The tests load the variant of the programs that the
//! daemon would load on such a kernel.

use std::{net::UdpSocket, ops::Deref};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use socket2::Socket;
use tunnel_tests::{
    sandbox::{RESPONSE_TIMEOUT, connect_within},
    shared_fixture::{Fixture, SharedFixture},
    wait,
};
use tunnel_userspace::{
    bpf::{self, Features, RcuGrace},
    source::file,
};

use crate::{
    fixture::{EMPTY, Scene, WEB},
    programs::Programs,
    support::{DNS, Dialer, HTTP, ensure_eq, errno, query},
};

/// A node whose programs were loaded by the test itself, without a daemon.
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
        let scene = Scene::prepare_web(&["backend"], &["backend"])?;
        let node = &scene.node;
        node.apply(EMPTY.service("empty"))?;
        let (programs, maps) = Programs::load(node, features, 64)?;
        let mut reconciler = programs.reconciler(maps, &RcuGrace::new()?)?;
        let (update, problems) = file::read(&node.manifests())?;
        ensure!(problems.is_empty(), "{problems:?}");
        reconciler.update(update);
        reconciler.write_changes();
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

static REWRITING: SharedFixture<Loaded> = SharedFixture::new(Loaded::new);

#[test]
fn programs_that_refuse_by_a_rewrite_translate() -> Result<()> {
    let scene = REWRITING.lease()?;
    scene.expect_served(WEB, "backend")?;
    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        dialer.expect_answer(&socket, WEB, DNS, "backend")?;
        socket.connect(dialer.address(WEB, DNS))?;
        ensure_eq("server", query(&socket)?, "backend")
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_tcp_connect_is_refused_by_loopback() -> Result<()> {
    let scene = REWRITING.lease()?;

    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        let refused = dialer.connect(sandbox, EMPTY, HTTP);
        ensure_eq("error", errno(refused), Errno::ECONNREFUSED)?;

        let socket = dialer.tcp_socket(sandbox)?;
        socket.set_nonblocking(true)?;
        let begun = socket.connect(&dialer.address(EMPTY, HTTP).into());
        ensure_eq("error", errno(begun), Errno::EINPROGRESS)?;
        let failed = wait::until_some(RESPONSE_TIMEOUT, || socket.take_error().transpose())??;
        ensure_eq("error", errno::<()>(Err(failed)), Errno::ECONNREFUSED)
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_connected_udp_socket_gets_the_refusal_and_a_datagram_is_not_permitted()
-> Result<()> {
    let scene = REWRITING.lease()?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.connect_udp(sandbox, EMPTY, DNS)?;
        socket.send(b"who?")?;
        let heard = errno(socket.recv(&mut [0; 16]));
        ensure_eq("heard", heard, Errno::ECONNREFUSED)?;
        ensure_eq(
            "peer",
            socket.peer_addr()?,
            dialer.reported_address(EMPTY, DNS),
        )?;
        let sent = dialer
            .udp_socket(sandbox)?
            .send_to(b"who?", dialer.address(EMPTY, DNS));
        ensure_eq("sent", errno(sent), Errno::EPERM)
    })?;
    scene.give_back()
}

#[test]
fn without_set_retval_a_socket_bound_to_a_device_is_refused_too() -> Result<()> {
    let scene = REWRITING.lease()?;

    for (device, sandbox) in scene.devices() {
        for dialer in Dialer::TCP {
            let socket = dialer.tcp_socket(sandbox)?;
            socket.bind_device(Some(device.as_bytes()))?;
            let refused = errno(connect_within(
                &socket,
                dialer.address(EMPTY, HTTP),
                RESPONSE_TIMEOUT,
            ));
            ensure_eq(
                &format!("{dialer:?} by {device}"),
                refused,
                Errno::ENETUNREACH,
            )?;
        }
        for dialer in Dialer::UDP {
            let socket = Socket::from(dialer.udp_socket(sandbox)?);
            socket.bind_device(Some(device.as_bytes()))?;
            let (socket, to) = (UdpSocket::from(socket), dialer.address(EMPTY, DNS));
            let refused = [socket.connect(to), socket.send_to(b"who?", to).map(drop)];
            ensure_eq(
                &format!("{dialer:?} by {device}"),
                refused.map(errno),
                [Errno::EPERM; 2],
            )?;
        }
    }
    scene.give_back()
}
