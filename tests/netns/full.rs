//! Full maps: a Service that finds no free entry is refused and reported, and the others keep working.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    admin,
    instance::Settings,
    manifest::{Protocol, Service},
    wait,
};

use crate::{
    scene::Scene,
    support::{CHANGE, HTTP, HTTP_TARGET, Vip, Way, http, ports, same, until_backends, until_gone},
};

const FIRST: Vip = Vip::of(10);
const SECOND: Vip = Vip::of(11);
const THIRD: Vip = Vip::of(12);

/// Builds a single-stack Service with one frontend and two backends.
fn service(scene: &Scene, name: &str, vip: Vip, way: Way) -> Service {
    let front = way.to(vip, HTTP).ip();
    let same_family = scene
        .all()
        .into_iter()
        .filter(|address| address.is_ipv4() == front.is_ipv4());
    Service::new(name, [front])
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .backends(same_family)
}

struct Stage {
    scene: Scene,
    way: Way,
}

impl Stage {
    /// Starts a node whose map sizes `limit` sets, with two Services of two backends each.
    fn with(way: Way, room: impl FnOnce(&mut Settings)) -> Result<Self> {
        let scene = Scene::with(&["one", "two"], room)?;
        scene.node.start()?;
        for (name, vip) in [("first", FIRST), ("second", SECOND)] {
            scene.node.apply(service(&scene, name, vip, way))?;
            until_backends(&scene.node, name, 2)?;
        }
        Ok(Self { scene, way })
    }

    fn refused(&self, reason: &str) -> Result<u64> {
        let name = format!("culvert_unprogrammed_service_ports{{reason=\"{reason}\"}}");
        Ok(admin::metric(&self.scene.node.metrics()?, &name).unwrap_or(0))
    }

    fn reaches(&self, vip: Vip) -> Result<()> {
        for place in [self.scene.node.host(), &self.scene.client] {
            http(self.way.connect(place, vip, HTTP)?)?;
        }
        Ok(())
    }
}

/// Applies a third Service that finds no free entry. Expects every status, metric and log to show the
/// refusal, and the Service to be programmed once entries are free.
fn third_is_refused(stage: &Stage, reason: &str) -> Result<()> {
    let node = &stage.scene.node;

    node.apply(service(&stage.scene, "third", THIRD, stage.way))?;

    wait::until(CHANGE, || {
        stage.refused(reason).is_ok_and(|count| count == 1)
    })
    .with_context(|| node.logs())?;
    let listed = node.culvert(&["services", "--output", "json"])?;
    let services: serde_json::Value = serde_json::from_str(&listed.stdout)?;
    let third = ports(&services, "third");
    same("refused", &third[0]["reason"], reason)?;
    let table = node.culvert(&["services"])?.stdout;
    let line = table.lines().find(|line| line.contains("default/third"));
    ensure!(
        line.is_some_and(|line| line.contains("not programmed")),
        "{table}"
    );
    let told = |line: &str| line.contains("default/third") && line.contains(reason);
    ensure!(node.logs().lines().any(told), "{}", node.logs());
    let status = node.culvert(&["status"])?.stdout;
    ensure!(status.contains(reason), "{status}");
    stage
        .way
        .connect(node.host(), THIRD, HTTP)
        .expect_err("the third Service is not programmed");
    stage.reaches(FIRST)?;
    stage.reaches(SECOND)?;

    node.withdraw("first.yaml")?;
    until_gone(node, "first")?;
    until_backends(node, "third", 2)?;
    wait::until(CHANGE, || {
        stage.refused(reason).is_ok_and(|count| count == 0)
    })?;
    stage.reaches(SECOND)?;
    stage.reaches(THIRD)?;
    stage
        .way
        .connect(node.host(), FIRST, HTTP)
        .expect_err("the first Service was removed");
    Ok(())
}

/// Runs [`third_is_refused`] in each family, with the map sizes that `limit` sets.
fn third_is_refused_with(room: impl Fn(&mut Settings), reason: &str) -> Result<()> {
    [Way::V4, Way::V6].into_iter().try_for_each(|way| {
        let stage = Stage::with(way, &room)?;
        third_is_refused(&stage, reason).with_context(|| format!("{way:?}"))
    })
}

#[test]
fn a_service_without_room_for_its_front_waits_for_one() -> Result<()> {
    third_is_refused_with(|settings| settings.maps.frontends = 2, "frontends_full")
}

#[test]
#[ignore = "no kernel decides it: an array: the daemon gives its indices out"]
fn a_service_without_room_for_its_slots_waits_for_some() -> Result<()> {
    third_is_refused_with(|settings| settings.maps.slots = 5, "slots_full")
}

#[test]
#[ignore = "no kernel decides it: an array: the daemon gives its indices out"]
fn a_service_without_room_for_its_backends_waits_for_some() -> Result<()> {
    third_is_refused_with(|settings| settings.maps.backends = 5, "backends_full")
}

#[test]
fn a_daemon_starts_on_maps_that_are_full() -> Result<()> {
    for way in [Way::V4, Way::V6] {
        let stage = Stage::with(way, |settings| {
            settings.maps.frontends = 2;
            settings.maps.slots = 4;
            settings.maps.backends = 4;
        })?;
        for _ in 0..2 {
            stage.scene.node.kill9()?;
            stage.scene.node.start()?;
            stage.reaches(FIRST)?;
            stage.reaches(SECOND)?;
        }
    }
    Ok(())
}
