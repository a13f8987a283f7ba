//! Session affinity: clients keep their backend (`sessionAffinity: ClientIP`).

use std::{collections::BTreeSet, sync::Barrier, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock, instance,
    manifest::{Manifest, Protocol, Service},
    place::Place,
    shared::Shared,
    wait,
};

use crate::{
    scene::{Scene, WEB},
    support::{
        CHANGE, DNS, DNS_TARGET, HOST, HTTP, HTTP_TARGET, Vip, Way, ask, ask_to, counted, same,
        until_backends,
    },
};

const NODE_HTTP: u16 = 30_081;
/// The number of connects that must all reach one backend. By chance, twelve connects to three backends
/// do so once in 177,147 runs.
const TRIES: usize = 12;

/// The number of Services that two threads dial at the same time; the race can happen at each of them.
const SERVICES: u8 = 250;

/// The names of all algorithms.
const ALGORITHMS: [&str; 6] = [
    "random",
    "round-robin",
    "source-hash",
    "destination-hash",
    "maglev",
    "least-conn",
];

static SCENE: Shared<Scene> = Shared::new(|| Scene::started(&["one", "two", "three"]));

/// Builds a Service without endpoints, with an affinity timeout of this many seconds.
fn kept_for(seconds: u32) -> Service {
    plain().spec("sessionAffinity: ClientIP").spec(&format!(
        "sessionAffinityConfig: {{ clientIP: {{ timeoutSeconds: {seconds} }} }}"
    ))
}

/// Builds the same Service without affinity.
fn plain() -> Service {
    Service::new("web", WEB.ips())
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .node_port(NODE_HTTP)
        .port(Protocol::UDP, DNS, DNS_TARGET)
}

/// Makes this many connects; returns the names of the servers that answer.
fn seen(place: &Place, way: Way, times: usize) -> Result<BTreeSet<String>> {
    (0..times).map(|_| way.dial(place, WEB, HTTP)).collect()
}

#[test]
fn a_client_keeps_its_backend_at_every_address_of_the_service() -> Result<()> {
    let scene = SCENE.take()?;
    scene.program(kept_for(600).backends(scene.all()))?;

    scene.each(&Way::TCP, |place, way| {
        let first = way.dial(place, WEB, HTTP)?;
        let again = || {
            for _ in 0..TRIES {
                way.is_served(place, WEB, HTTP, &first)?;
                way.is_served(place, HOST, NODE_HTTP, &first)?;
            }
            Ok(())
        };
        let ((), grown) = counted(&scene.node, &["translated_affinity"], again)?;
        same("counted", grown, vec![2 * u64::try_from(TRIES)?])
    })?;
    scene.give_back()
}

#[test]
fn a_client_keeps_its_backend_over_udp_sockets() -> Result<()> {
    let scene = SCENE.take()?;
    scene.program(kept_for(600).backends(scene.all()))?;

    scene.each(&Way::UDP, |place, way| {
        let (first, _) = ask_to(&way.udp(place)?, way.to(WEB, DNS))?;
        for _ in 0..TRIES {
            way.is_answered(&way.udp(place)?, WEB, DNS, &first)?;
            way.asked(place, WEB, DNS, &first)?;
        }
        Ok(())
    })?;
    scene.give_back()
}

#[test]
#[ignore = "no kernel decides it: the same look at the same map, before any algorithm"]
fn a_client_keeps_its_backend_whatever_the_algorithm_and_however_few_there_are() -> Result<()> {
    let scene = SCENE.take()?;
    let one = scene.addresses(&["one"])?;
    scene.program(kept_for(600))?;
    for algorithm in ALGORITHMS {
        for backends in [one.clone(), scene.all()] {
            let service = kept_for(600).annotated("culvert.dev/algorithm", algorithm);
            // An update without endpoints first, so that no affinity entry is valid any more.
            scene.node.apply(service.clone())?;
            until_backends(&scene.node, "web", 0)?;
            let count = backends.len() / 2;
            scene.node.apply(service.backends(backends))?;
            until_backends(&scene.node, "web", count)?;
            for way in Way::TCP {
                let story = || {
                    let first = way.dial(&scene.client, WEB, HTTP)?;
                    let again = seen(&scene.client, way, TRIES)?;
                    same("servers", again, BTreeSet::from([first]))
                };
                story().with_context(|| format!("{algorithm} of {count}, {way:?}"))?;
            }
        }
    }
    scene.give_back()
}

#[test]
#[ignore = "no kernel decides it: the same look at the same map, before any algorithm"]
fn connects_of_clients_that_keep_theirs_take_nobodys_turn() -> Result<()> {
    let scene = SCENE.take()?;
    let service = kept_for(600).annotated("culvert.dev/algorithm", "round-robin");
    scene.program(service.backends(scene.without("three")))?;

    for way in [Way::V4, Way::V6] {
        let mut servers = Vec::new();
        for number in 0..4 {
            let client = scene.node.pod(&format!("c{number}-{way:?}"))?;
            servers.push(way.dial(&client, WEB, HTTP)?);
            way.dial(&client, WEB, HTTP)?;
        }

        same("turns", &servers[..2], &servers[2..])?;
        ensure!(servers[0] != servers[1], "{way:?}: {servers:?}");
    }
    scene.give_back()
}

/// Connects to each Service at the same time as another thread; returns the names of the servers that
/// answer.
fn in_step(place: &Place, way: Way, steps: &Barrier) -> Result<Vec<String>> {
    let sockets: Vec<_> = (1..=SERVICES)
        .map(|number| Ok((number, way.udp(place)?)))
        .collect::<Result<_>>()?;
    for (number, socket) in &sockets {
        let to = way.to(Vip::of(*number), DNS);
        steps.wait();
        socket.connect(to)?;
    }
    sockets.iter().map(|(_, socket)| ask(socket)).collect()
}

#[test]
fn sockets_that_connect_at_once_for_the_first_time_get_one_backend() -> Result<()> {
    let scene = SCENE.take()?;
    let service = |number| {
        let name = format!("web-{number}");
        let service = Vip::of(number).service(&name);
        service
            .spec("sessionAffinity: ClientIP")
            .backends(scene.all())
    };
    let services: Vec<Service> = (1..=SERVICES).map(service).collect();
    scene
        .node
        .apply(Manifest::of_services("services.yaml", &services))?;
    for name in ["web-1", &format!("web-{SERVICES}")] {
        until_backends(&scene.node, name, 3)?;
    }

    for way in [Way::V4, Way::V6] {
        let steps = Barrier::new(2);
        let [one, other] = thread::scope(|scope| {
            let dial = || in_step(&scene.client, way, &steps);
            [scope.spawn(dial), scope.spawn(dial)].map(|dial| dial.join().ok())
        });
        let (one, other) = (one.context("a thread panicked")??, other.context("a thread panicked")??);
        same("servers", one, other).with_context(|| format!("{way:?}"))?;
    }
    scene.give_back()
}

#[test]
fn affinity_is_switched_on_and_off_while_clients_connect() -> Result<()> {
    let scene = SCENE.take()?;
    scene.program(plain().backends(scene.all()))?;
    let spreads = |way| seen(&scene.client, way, TRIES).map(|seen| seen.len() > 1);
    let until = |wanted: bool| {
        let is_so = |way| spreads(way).is_ok_and(|spreads| spreads == wanted);
        wait::until(CHANGE, || is_so(Way::V4) && is_so(Way::V6))
            .with_context(|| format!("connects reach several backends: never {wanted}"))
    };

    until(true)?;
    for _ in 0..2 {
        scene.node.apply(kept_for(600).backends(scene.all()))?;
        until(false)?;
        scene.node.apply(plain().backends(scene.all()))?;
        until(true)?;
    }
    scene.give_back()
}

#[test]
#[ignore = "no kernel decides it: the daemon marks the backend"]
fn a_client_never_keeps_a_backend_that_takes_no_connections() -> Result<()> {
    let scene = SCENE.take()?;
    scene.program(kept_for(600).backends(scene.all()))?;

    for way in [Way::V4, Way::V6] {
        let first = way.dial(&scene.client, WEB, HTTP)?;
        let going = kept_for(600).backends(scene.without(&first));
        let leaving = scene.addresses(&[&first])?;
        let going = leaving.into_iter().fold(going, Service::terminating);
        scene.node.apply(going)?;

        let has_left = || {
            way.dial(&scene.client, WEB, HTTP)
                .is_ok_and(|it| it != first)
        };
        wait::until(CHANGE, has_left).context("the client keeps a terminating backend")?;
        let second = way.dial(&scene.client, WEB, HTTP)?;
        scene.node.apply(kept_for(600).backends(scene.all()))?;
        clock::pause(Duration::from_secs(1));
        let seen = seen(&scene.client, way, TRIES)?;
        same("servers after the return of the backend", seen, [second].into())?;
    }
    scene.give_back()
}

#[test]
#[ignore = "no kernel decides it: arithmetic with entries of the maps"]
fn a_backend_that_one_policy_admits_is_not_kept_where_another_does_not() -> Result<()> {
    let scene = SCENE.take()?;
    let near = scene.addresses(&["one"])?;
    let web = kept_for(600)
        .spec("internalTrafficPolicy: Local")
        .on("other")
        .backends(scene.without("one"))
        .on(instance::NODE)
        .backends(near);
    scene.program(web)?;

    for way in [Way::V4, Way::V6] {
        // Node ports lead to all endpoints, the cluster IP only to those of this node.
        for round in 0..TRIES {
            let client = scene.node.pod(&format!("near{round}-{way:?}"))?;
            way.dial(&client, HOST, NODE_HTTP)?;
            for _ in 0..2 {
                way.is_served(&client, WEB, HTTP, "one")?;
            }
        }
    }
    scene.give_back()
}

#[test]
fn a_client_keeps_its_backend_over_a_restart_of_the_daemon() -> Result<()> {
    let scene = SCENE.take()?;
    scene.program(kept_for(600).backends(scene.all()))?;

    for way in [Way::V4, Way::V6] {
        let first = way.dial(&scene.client, WEB, HTTP)?;
        scene.node.kill9()?;
        let seen = || seen(&scene.client, way, TRIES);
        same("servers without a daemon", seen()?, [first.clone()].into())?;
        scene.node.start()?;
        same("servers after the restart", seen()?, [first].into())?;
    }
    scene.give_back()
}
