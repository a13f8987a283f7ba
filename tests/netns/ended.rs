//! Connected sockets whose backend has gone: which are ended, which are not, and how soon.

use std::{fs, net::UdpSocket, ops::Deref, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{clock::Instant, scale::Scale, wait};

use crate::{
    reach::{self, BALANCER, EXTERNAL},
    scene::{Client, OTHER, Scene, WEB},
    support::{
        CHANGE, DNS, DNS_TARGET, HTTP, RECOVERY, Vip, Way, ask, ask_to, errno, http, is_ended,
        receive, same, until_backends,
    },
};

/// A node with a Service, whose backend is `one` at first.
struct Stage(Scene);

impl Deref for Stage {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.0
    }
}

impl Stage {
    fn new() -> Result<Self> {
        let stage = Self::set()?;
        stage.node.start()?;
        Ok(stage)
    }

    /// With these sockets to be ended.
    fn ending(protocols: &str) -> Result<Self> {
        let stage = Self::set()?;
        stage.end(protocols)?;
        stage.node.start()?;
        Ok(stage)
    }

    fn set() -> Result<Self> {
        let scene = Scene::new(&["one", "two"])?;
        scene.lead_to(&["one"])?;
        Ok(Self(scene))
    }

    /// Says of which protocols sockets are ended, from the next start on.
    fn end(&self, protocols: &str) -> Result<()> {
        let config = fs::read_to_string(self.node.config_path())?;
        let config = config.split("sockets:").next().unwrap_or_default();
        let config = format!("{config}sockets: {{ end: {protocols} }}\n");
        fs::write(self.node.config_path(), config).context("cannot write the config")
    }

    /// Connected UDP sockets in each way that were answered by `one`.
    fn connected(&self) -> Result<Vec<(Client<'_>, UdpSocket)>> {
        self.0.connected(WEB, "one")
    }

    fn asked(&self) -> Result<u64> {
        Ok(self.backend("one")?.server.record()?.total().answered)
    }

    /// Waits until as many sockets were ended, and no more.
    fn until_ended(&self, count: u64) -> Result<()> {
        let ended = || self.node.reason("socket_ended").unwrap_or(0);
        wait::until(CHANGE, || ended() >= count).with_context(|| format!("{} ended", ended()))?;
        same("ended", ended(), count)
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn a_connected_resolver_has_another_backend_at_once_when_its_own_is_removed() -> Result<()> {
    let stage = Stage::new()?;
    let sockets = stage.connected()?;
    let count = u64::try_from(sockets.len())?;

    let longest = thread::scope(|scope| -> Result<_> {
        let mut recovered = Vec::new();
        for (client, socket) in sockets {
            recovered.push(scope.spawn(move || -> Result<Instant> {
                is_ended(&socket).with_context(|| client.to_string())?;
                socket.connect(client.way.to(WEB, DNS))?;
                same("server", ask(&socket)?, "two".to_owned())?;
                Ok(Instant::now())
            }));
        }
        let start = Instant::now();
        stage.lead_to(&["two"])?;
        let mut longest = Duration::ZERO;
        for client in recovered {
            let at = client.join().ok().context("a client panicked")??;
            longest = longest.max(at.duration_since(start));
        }
        Ok(longest)
    })?;

    let look = stage.node.status()?["sockets"]["lastLookSeconds"].clone();
    println!("recovered within {longest:?} of the change; the look took {look} s");
    stage.until_ended(count)?;
    let allowed = Scale::from_environment().patience(RECOVERY);
    ensure!(longest < allowed, "recovered only after {longest:?}");
    Ok(())
}

#[test]
fn nothing_reaches_the_last_backend_of_a_service_that_lost_it_or_is_deleted() -> Result<()> {
    for is_deleted in [false, true] {
        let stage = Stage::new()?;
        let sockets = stage.connected()?;
        let asked = stage.asked()?;

        if is_deleted {
            stage.node.withdraw("web.yaml")?;
        } else {
            stage.lead_to(&[])?;
        }

        for (client, socket) in &sockets {
            let story = || {
                is_ended(socket)?;
                same("send", errno(socket.send(b"who?")), Errno::EDESTADDRREQ)?;
                if !is_deleted {
                    let refused = socket
                        .connect(client.way.to(WEB, DNS))
                        .map_err(Into::into)
                        .and_then(|()| ask(socket));
                    ensure!(refused.is_err(), "answered");
                }
                Ok(())
            };
            story().with_context(|| client.to_string())?;
        }
        same("datagrams", stage.asked()?, asked)?;
    }
    Ok(())
}

#[test]
fn nothing_reaches_the_last_backend_by_any_other_address_of_its_service_either() -> Result<()> {
    let stage = Stage::set()?;
    let service = reach::service_everywhere;
    stage
        .node
        .apply(service().backends(stage.addresses(&["one"])?))?;
    stage.node.start()?;
    let ways = [
        (EXTERNAL, DNS),
        (BALANCER, DNS),
        (reach::HOST, reach::NODE_DNS),
    ];
    let mut sockets = Vec::new();
    for (vip, port) in ways {
        sockets.extend(stage.open(&Way::UDP, |place, way| way.asked(place, vip, port, "one"))?);
    }
    let asked = stage.asked()?;

    stage.node.apply(service())?;

    for (client, socket) in &sockets {
        let story = || {
            is_ended(socket)?;
            same("send", errno(socket.send(b"who?")), Errno::EDESTADDRREQ)
        };
        story().with_context(|| client.to_string())?;
    }
    same("datagrams", stage.asked()?, asked)
}

#[test]
fn a_socket_that_is_not_connected_goes_over_and_still_hears_the_backend_that_went() -> Result<()> {
    let stage = Stage::new()?;
    let late = stage.node.pod("late")?;
    let listener = late.udp(("::", DNS_TARGET))?;
    let sockets = stage.open(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        let (name, _) = ask_to(&socket, way.to(WEB, DNS))?;
        same("server", name, "one".to_owned())?;
        Ok(socket)
    })?;
    let witnesses = stage.connected()?;

    // All flows are moved to the backend that answers late.
    let service = WEB.service("web").backends([late.v4(), late.v6()]);
    stage.node.apply(service)?;
    stage.until_ended(u64::try_from(witnesses.len())?)?;
    let mut waiting = Vec::new();
    for (client, socket) in sockets {
        socket.send_to(b"who?", client.way.to(WEB, DNS))?;
        let (_, from) = listener.recv_from(&mut [0; 64])?;
        waiting.push((client, socket, from));
    }
    let more = stage.open(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        socket.connect(way.to(WEB, DNS))?;
        Ok(socket)
    })?;

    stage.lead_to(&["two"])?;
    more.iter().try_for_each(|(_, socket)| is_ended(socket))?;

    for (client, socket, from) in &waiting {
        let story = || {
            listener.send_to(b"late answer", from)?;
            let (name, sender) = receive(socket)?;
            same("server", name, "late".to_owned())?;
            same("sender", sender, client.way.shown(WEB, DNS))?;
            let (name, sender) = ask_to(socket, client.way.to(WEB, DNS))?;
            same("server", name, "two".to_owned())?;
            same("sender", sender, client.way.shown(WEB, DNS))
        };
        story().with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(witnesses.len() + more.len())?)
}

#[test]
fn a_connection_over_tcp_goes_on_with_a_backend_that_left_its_service() -> Result<()> {
    let stage = Stage::new()?;
    let streams = stage.open(&Way::TCP, |place, way| Ok(way.connect(place, WEB, HTTP)?))?;
    let witnesses = stage.connected()?;

    stage.lead_to(&["two"])?;
    stage.until_ended(u64::try_from(witnesses.len())?)?;

    for (client, stream) in streams {
        same("peer", stream.peer_addr()?, client.way.shown(WEB, HTTP))?;
        let name = http(stream).with_context(|| client.to_string())?;
        same("server", name, "one".to_owned())?;
    }
    Ok(())
}

#[test]
fn a_connection_over_tcp_is_ended_where_the_config_wants_that() -> Result<()> {
    let stage = Stage::ending("[tcp]")?;
    let streams = stage.open(&Way::TCP, |place, way| Ok(way.connect(place, WEB, HTTP)?))?;
    let direct = stage
        .client
        .connect(stage.backend("one")?.at4(crate::support::HTTP_TARGET))?;
    let stays = stage.connected()?;

    stage.lead_to(&["two"])?;

    for (client, stream) in &streams {
        let error = errno(stream.peek(&mut [0]));
        same("error", error, Errno::ECONNABORTED).with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(streams.len())?)?;
    same("server", http(direct)?, "one".to_owned())?;
    for (client, socket) in &stays {
        same("server", ask(socket)?, "one".to_owned()).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn a_socket_that_was_not_sent_to_the_backend_by_its_service_is_left_alone() -> Result<()> {
    let stage = Stage::new()?;
    let one = Vip::of_pod(stage.backend("one")?);
    let two = Vip::of_pod(stage.backend("two")?);
    let mut direct = Vec::new();
    for (client, ()) in stage.open(&Way::UDP, |_, _| Ok(()))? {
        let way = client.way;
        // It never knew the Service.
        let plain = way.udp(client.place)?;
        plain.connect(way.to(one, DNS_TARGET))?;
        direct.push((client, plain, "one"));
        // It knew it, then dialled the backend itself.
        let former = way.udp(client.place)?;
        former.connect(way.to(WEB, DNS))?;
        former.connect(way.to(one, DNS_TARGET))?;
        direct.push((client, former, "one"));
        // It asks the Service besides what it is connected to.
        let besides = way.udp(client.place)?;
        besides.connect(way.to(two, DNS_TARGET))?;
        besides.send_to(b"who?", way.to(WEB, DNS))?;
        direct.push((client, besides, "two"));
    }
    let witnesses = stage.connected()?;

    stage.lead_to(&["two"])?;
    stage.until_ended(u64::try_from(witnesses.len())?)?;

    for (client, socket, name) in &direct {
        let story = || same("server", ask(socket)?, (*name).to_owned());
        story().with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn a_socket_that_asked_another_service_since_it_connected_goes_with_its_own_backend() -> Result<()>
{
    let stage = Stage::new()?;
    let other = OTHER.service("other").backends(stage.addresses(&["two"])?);
    stage.node.apply(other)?;
    until_backends(&stage.node, "other", 1)?;
    let sockets = stage.connected()?;
    for (client, socket) in &sockets {
        socket.send_to(b"who?", client.way.to(OTHER, DNS))?;
    }

    stage.node.withdraw("web.yaml")?;

    for (client, socket) in &sockets {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn what_a_daemon_left_that_was_killed_is_ended_by_the_next_one() -> Result<()> {
    // The first daemon retires the backend and ends nothing, as one that is killed in between.
    let stage = Stage::ending("[]")?;
    let lost = stage.connected()?;
    stage.lead_to(&["two"])?;
    until_backends(&stage.node, "web", 1)?;
    let serving = stage.open(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        wait::until(CHANGE, || {
            let again = socket.connect(way.to(WEB, DNS)).is_ok();
            again && ask(&socket).is_ok_and(|name| name == "two")
        })?;
        Ok(socket)
    })?;
    for (client, socket) in &lost {
        same("server", ask(socket)?, "one".to_owned()).with_context(|| client.to_string())?;
    }

    stage.node.kill9()?;
    stage.end("[udp]")?;
    stage.node.start()?;

    for (client, socket) in &lost {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(lost.len())?)?;
    for (client, socket) in &serving {
        same("server", ask(socket)?, "two".to_owned()).with_context(|| client.to_string())?;
    }
    // And what went while there was no daemon.
    stage.node.kill9()?;
    stage.lead_to(&["one"])?;
    stage.node.start()?;
    for (client, socket) in &serving {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    stage.until_ended(u64::try_from(serving.len())?)
}
