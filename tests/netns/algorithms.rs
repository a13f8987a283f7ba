//! Load-balancing algorithms and weights.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    manifest::Service,
    sandbox::Sandbox,
    shared_fixture::{Fixture as _, Lease, SharedFixture},
};

use crate::{
    fixture::{Scene, WEB},
    support::{Dialer, HTTP, HTTP_TARGET, ensure_eq},
};

const ALGORITHM: &str = "culvert.dev/algorithm";
const WEIGHTS: &str = "culvert.dev/weights";

static SCENE: SharedFixture<Scene> =
    SharedFixture::new(|| Scene::started(&["one", "two", "three", "four"]));

/// Leases the shared scene and programs a Service with the given annotations. The backend `one` is in the
/// zone `north`, the other three are in `south`.
fn start(annotations: &[(&str, &str)]) -> Result<Lease<Scene>> {
    let scene = SCENE.lease()?;
    program(&scene, annotations)?;
    Ok(scene)
}

fn program(scene: &Scene, annotations: &[(&str, &str)]) -> Result<()> {
    let annotated = |web: Service, (key, value): &(&str, &str)| web.annotated(key, value);
    let web = annotations.iter().fold(WEB.service("web"), annotated);
    let web = web.in_zone("north").backends(scene.addresses(&["one"])?);
    scene.program(
        web.in_zone("south")
            .backends(scene.addresses_without("one")),
    )
}

/// Makes `times` connections and returns how many of them each backend answered.
fn counts(sandbox: &Sandbox, dialer: Dialer, times: u32) -> Result<BTreeMap<String, u32>> {
    let mut counts = BTreeMap::new();
    for _ in 0..times {
        *counts.entry(dialer.dial(sandbox, WEB, HTTP)?).or_default() += 1;
    }
    Ok(counts)
}

#[test]
#[ignore = "independent of the kernel: arithmetic; `endpoint_churn` and others choose slots"]
fn connects_are_distributed_by_weight() -> Result<()> {
    const CONNECTS: u32 = 600;
    let scene = start(&[(WEIGHTS, "zone:north=3")])?;

    for dialer in [Dialer::V4, Dialer::V6] {
        let counts = counts(&scene.client, dialer, CONNECTS)?;
        // "one" has three of the six slots, the others have one each. With 600 connections, the standard
        // deviation is 12.2 for "one" and 9.1 for the others. All but two in a million runs stay within 5
        // standard deviations of the mean.
        let of_south = ["two", "three", "four"].map(|name| (name, 100, 46));
        for (name, mean, most) in [("one", 300, 62)].into_iter().chain(of_south) {
            let count = *counts
                .get(name)
                .with_context(|| format!("no connect reached the backend {name}"))?;
            ensure!(u32::abs_diff(count, mean) <= most, "{dialer:?}: {counts:?}");
        }
    }
    scene.give_back()
}

#[test]
fn a_hash_of_the_source_leads_a_client_to_one_backend_and_clients_to_several() -> Result<()> {
    let scene = SCENE.lease()?;
    for algorithm in ["sh", "maglev"] {
        program(&scene, &[(ALGORITHM, algorithm)])?;
        let mut chosen = BTreeMap::new();
        for number in 0..12 {
            let client = scene.node.pod(&format!("c{number}"))?;
            for dialer in Dialer::TCP {
                let counts = counts(&client, dialer, 6)?;
                ensure!(counts.len() == 1, "{algorithm}, {dialer:?}: {counts:?}");
                let family = usize::from(dialer == Dialer::V6);
                chosen.extend(counts.into_keys().map(|name| ((family, name), number)));
            }
        }
        // All twelve clients choose the same one of the four backends by chance only once in four million
        // runs.
        for family in 0..2 {
            let several = chosen.keys().filter(|(of, _)| *of == family).count();
            ensure!(several > 1, "{algorithm}: {chosen:?}");
        }
        scene.restore()?;
    }
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: output of commands"]
fn commands_show_where_connects_go_and_why() -> Result<()> {
    let scene = start(&[(WEIGHTS, "zone:north=3, zone:south=0")])?;
    let node = &scene.node;
    let services = node.culvert(&["services", "default/web"])?.stdout;
    for dialer in [Dialer::V4, Dialer::V6] {
        let family = dialer.family();
        let at = |name: &str| -> Result<SocketAddr> {
            let pod = scene.backend(name)?;
            Ok((pod.address(family), HTTP_TARGET).into())
        };
        let lines = [
            format!("default/web  tcp-80 TCP {}", family.label()),
            format!("{}/TCP", dialer.address(WEB, HTTP)),
            "ClusterIP   Cluster   Cluster".to_owned(),
            at("one")?.to_string(),
            "active: ready".to_owned(),
            at("two")?.to_string(),
            "inactive: its weight is 0".to_owned(),
        ];
        for line in &lines {
            ensure!(services.contains(line), "no {line} in {services}");
        }
    }
    let backends = node.culvert(&["backends", "web"])?.stdout;
    ensure!(backends.lines().count() == 1 + 4 * 4, "{backends}");
    let yaml = node.culvert(&["backends", "web", "--output", "yaml"])?;
    let yaml = yaml.stdout.replace('"', "'");
    ensure!(yaml.contains("status: 'active: ready'"), "{yaml}");
    let json = node.culvert(&["services", "--output", "json"])?.stdout;
    let json: serde_json::Value = serde_json::from_str(&json)?;
    let weight = &json[0]["ports"][0]["endpoints"][0]["weight"];
    ensure_eq("weight", weight, 3)?;

    let unknown = node.culvert(&["services", "other/web"])?;
    ensure_eq("exit", unknown.exit.code, Some(1))?;
    let stderr = unknown.stderr;
    ensure!(stderr.contains("no Service other/web"), "{stderr}");
    scene.give_back()
}
