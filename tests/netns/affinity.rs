//! Session affinity (`sessionAffinity: ClientIP`): repeated connections from a client reach the same backend.

use std::{collections::BTreeSet, sync::Barrier, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock, culvert_instance,
    manifest::{Manifest, Protocol, Service},
    sandbox::Sandbox,
    shared_fixture::SharedFixture,
    wait,
};

use crate::{
    fixture::{Scene, WEB},
    support::{
        CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, HOST, HTTP, HTTP_TARGET, Vip, count_during,
        ensure_eq, query, query_to, until_backends,
    },
};

const NODE_HTTP: u16 = 30_081;
/// The number of connections that must all reach the same backend. With three backends, this happens by
/// chance in one of 177,147 runs.
const TRIES: usize = 12;

/// The number of Services that two threads dial in lockstep; each Service is another chance for the threads
/// to race.
const SERVICES: u8 = 250;

/// The names of all load-balancing algorithms.
const ALGORITHMS: [&str; 6] = [
    "random",
    "round-robin",
    "source-hash",
    "destination-hash",
    "maglev",
    "least-conn",
];

static SCENE: SharedFixture<Scene> =
    SharedFixture::new(|| Scene::started(&["one", "two", "three"]));

/// Builds the Service `web` with session affinity, whose timeout is `seconds`, and without endpoints.
fn with_affinity(seconds: u32) -> Service {
    without_affinity()
        .spec("sessionAffinity: ClientIP")
        .spec(&format!(
            "sessionAffinityConfig: {{ clientIP: {{ timeoutSeconds: {seconds} }} }}"
        ))
}

/// Builds the Service `web` without session affinity and without endpoints.
fn without_affinity() -> Service {
    Service::new("web", WEB.ips())
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .node_port(NODE_HTTP)
        .port(Protocol::UDP, DNS, DNS_TARGET)
}

/// Makes `times` connections and returns the names of the servers that answered.
fn servers(sandbox: &Sandbox, dialer: Dialer, times: usize) -> Result<BTreeSet<String>> {
    (0..times)
        .map(|_| dialer.dial(sandbox, WEB, HTTP))
        .collect()
}

#[test]
fn a_client_keeps_its_backend_at_every_address_of_the_service() -> Result<()> {
    let scene = SCENE.lease()?;
    scene.program(with_affinity(600).backends(scene.all_addresses()))?;

    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        let first = dialer.dial(sandbox, WEB, HTTP)?;
        let again = || {
            for _ in 0..TRIES {
                dialer.expect_served(sandbox, WEB, HTTP, &first)?;
                dialer.expect_served(sandbox, HOST, NODE_HTTP, &first)?;
            }
            Ok(())
        };
        let ((), increases) = count_during(&scene.node, &["translated_affinity"], again)?;
        ensure_eq("counted", increases, vec![2 * u64::try_from(TRIES)?])
    })?;
    scene.give_back()
}

#[test]
fn a_client_keeps_its_backend_over_udp_sockets() -> Result<()> {
    let scene = SCENE.lease()?;
    scene.program(with_affinity(600).backends(scene.all_addresses()))?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let (first, _) = query_to(&dialer.udp_socket(sandbox)?, dialer.address(WEB, DNS))?;
        for _ in 0..TRIES {
            dialer.expect_answer(&dialer.udp_socket(sandbox)?, WEB, DNS, &first)?;
            dialer.connect_udp_to(sandbox, WEB, DNS, &first)?;
        }
        Ok(())
    })?;
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: all algorithms share the affinity lookup"]
fn a_client_keeps_its_backend_with_every_algorithm_and_number_of_backends() -> Result<()> {
    let scene = SCENE.lease()?;
    let one = scene.addresses(&["one"])?;
    scene.program(with_affinity(600))?;
    for algorithm in ALGORITHMS {
        for backends in [one.clone(), scene.all_addresses()] {
            let service = with_affinity(600).annotated("culvert.dev/algorithm", algorithm);
            // Remove all endpoints first, to invalidate every affinity entry.
            scene.node.apply(service.clone())?;
            until_backends(&scene.node, "web", 0)?;
            let count = backends.len() / 2;
            scene.node.apply(service.backends(backends))?;
            until_backends(&scene.node, "web", count)?;
            for dialer in Dialer::TCP {
                let check = || {
                    let first = dialer.dial(&scene.client, WEB, HTTP)?;
                    let again = servers(&scene.client, dialer, TRIES)?;
                    ensure_eq("servers", again, BTreeSet::from([first]))
                };
                check().with_context(|| format!("{algorithm} of {count}, {dialer:?}"))?;
            }
        }
    }
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: all algorithms share the affinity lookup"]
fn connects_of_clients_with_affinity_take_no_round_robin_turn() -> Result<()> {
    let scene = SCENE.lease()?;
    let service = with_affinity(600).annotated("culvert.dev/algorithm", "round-robin");
    scene.program(service.backends(scene.addresses_without("three")))?;

    for dialer in [Dialer::V4, Dialer::V6] {
        let mut servers = Vec::new();
        for number in 0..4 {
            let client = scene.node.pod(&format!("c{number}-{dialer:?}"))?;
            servers.push(dialer.dial(&client, WEB, HTTP)?);
            dialer.dial(&client, WEB, HTTP)?;
        }

        ensure_eq("turns", &servers[..2], &servers[2..])?;
        ensure!(servers[0] != servers[1], "{dialer:?}: {servers:?}");
    }
    scene.give_back()
}

/// Connects to each Service at the same moment as the other thread, and returns the names of the servers that
/// answered.
fn dial_in_step(sandbox: &Sandbox, dialer: Dialer, steps: &Barrier) -> Result<Vec<String>> {
    let sockets: Vec<_> = (1..=SERVICES)
        .map(|number| Ok((number, dialer.udp_socket(sandbox)?)))
        .collect::<Result<_>>()?;
    for (number, socket) in &sockets {
        let to = dialer.address(Vip::of(*number), DNS);
        steps.wait();
        socket.connect(to)?;
    }
    sockets.iter().map(|(_, socket)| query(socket)).collect()
}

#[test]
fn first_connects_at_the_same_time_get_one_backend() -> Result<()> {
    let scene = SCENE.lease()?;
    let service = |number| {
        let name = format!("web-{number}");
        let service = Vip::of(number).service(&name);
        service
            .spec("sessionAffinity: ClientIP")
            .backends(scene.all_addresses())
    };
    let services: Vec<Service> = (1..=SERVICES).map(service).collect();
    scene
        .node
        .apply(Manifest::of_services("services.yaml", &services))?;
    for name in ["web-1", &format!("web-{SERVICES}")] {
        until_backends(&scene.node, name, 3)?;
    }

    for dialer in [Dialer::V4, Dialer::V6] {
        let steps = Barrier::new(2);
        let [one, other] = thread::scope(|scope| {
            let dial = || dial_in_step(&scene.client, dialer, &steps);
            [scope.spawn(dial), scope.spawn(dial)].map(|dial| dial.join().ok())
        });
        let (one, other) = (
            one.context("a thread panicked")??,
            other.context("a thread panicked")??,
        );
        ensure_eq("servers", one, other).with_context(|| format!("{dialer:?}"))?;
    }
    scene.give_back()
}

#[test]
fn affinity_is_switched_on_and_off_while_clients_connect() -> Result<()> {
    let scene = SCENE.lease()?;
    scene.program(without_affinity().backends(scene.all_addresses()))?;
    let spreads = |dialer| servers(&scene.client, dialer, TRIES).map(|seen| seen.len() > 1);
    let until = |wanted: bool| {
        let is_so = |dialer| spreads(dialer).is_ok_and(|spreads| spreads == wanted);
        wait::until(CHANGE_TIMEOUT, || is_so(Dialer::V4) && is_so(Dialer::V6))
            .with_context(|| format!("connects reach several backends: never {wanted}"))
    };

    until(true)?;
    for _ in 0..2 {
        scene
            .node
            .apply(with_affinity(600).backends(scene.all_addresses()))?;
        until(false)?;
        scene
            .node
            .apply(without_affinity().backends(scene.all_addresses()))?;
        until(true)?;
    }
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: the daemon marks the backend"]
fn a_client_does_not_keep_a_terminating_backend() -> Result<()> {
    let scene = SCENE.lease()?;
    scene.program(with_affinity(600).backends(scene.all_addresses()))?;

    for dialer in [Dialer::V4, Dialer::V6] {
        let first = dialer.dial(&scene.client, WEB, HTTP)?;
        let service = with_affinity(600).backends(scene.addresses_without(&first));
        let leaving = scene.addresses(&[&first])?;
        let service = leaving.into_iter().fold(service, Service::terminating);
        scene.node.apply(service)?;

        let has_left = || {
            dialer
                .dial(&scene.client, WEB, HTTP)
                .is_ok_and(|it| it != first)
        };
        wait::until(CHANGE_TIMEOUT, has_left).context("the client keeps a terminating backend")?;
        let second = dialer.dial(&scene.client, WEB, HTTP)?;
        scene
            .node
            .apply(with_affinity(600).backends(scene.all_addresses()))?;
        clock::pause(Duration::from_secs(1));
        let seen = servers(&scene.client, dialer, TRIES)?;
        ensure_eq(
            "servers after the return of the backend",
            seen,
            [second].into(),
        )?;
    }
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: arithmetic on map entries"]
fn affinity_does_not_lead_to_a_backend_that_the_policy_excludes() -> Result<()> {
    let scene = SCENE.lease()?;
    let near = scene.addresses(&["one"])?;
    let web = with_affinity(600)
        .spec("internalTrafficPolicy: Local")
        .on_node("other")
        .backends(scene.addresses_without("one"))
        .on_node(culvert_instance::NODE_NAME)
        .backends(near);
    scene.program(web)?;

    for dialer in [Dialer::V4, Dialer::V6] {
        // The node ports lead to all endpoints, the cluster IP only to those on this node.
        for round in 0..TRIES {
            let client = scene.node.pod(&format!("near{round}-{dialer:?}"))?;
            dialer.dial(&client, HOST, NODE_HTTP)?;
            for _ in 0..2 {
                dialer.expect_served(&client, WEB, HTTP, "one")?;
            }
        }
    }
    scene.give_back()
}

#[test]
fn a_client_keeps_its_backend_over_a_restart_of_the_daemon() -> Result<()> {
    let scene = SCENE.lease()?;
    scene.program(with_affinity(600).backends(scene.all_addresses()))?;

    for dialer in [Dialer::V4, Dialer::V6] {
        let first = dialer.dial(&scene.client, WEB, HTTP)?;
        scene.node.kill9()?;
        let seen = || servers(&scene.client, dialer, TRIES);
        ensure_eq("servers without a daemon", seen()?, [first.clone()].into())?;
        scene.node.start()?;
        ensure_eq("servers after the restart", seen()?, [first].into())?;
    }
    scene.give_back()
}
