//! Tests full maps: a Service for which there are no free map entries is refused and reported, while the
//! other Services keep working.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    admin,
    culvert_instance::InstanceSettings,
    manifest::{Protocol, Service},
    wait,
};

use crate::{
    fixture::Scene,
    support::{
        CHANGE_TIMEOUT, Dialer, HTTP, HTTP_TARGET, Vip, ensure_eq, http_server_name, ports,
        until_backends, until_gone,
    },
};

const FIRST: Vip = Vip::of(10);
const SECOND: Vip = Vip::of(11);
const THIRD: Vip = Vip::of(12);

/// Builds a single-stack Service with one frontend. All of the node's server pods are its backends.
fn service(scene: &Scene, name: &str, vip: Vip, dialer: Dialer) -> Service {
    let frontend = dialer.address(vip, HTTP).ip();
    let same_family = scene
        .all_addresses()
        .into_iter()
        .filter(|address| address.is_ipv4() == frontend.is_ipv4());
    Service::new(name, [frontend])
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .backends(same_family)
}

struct LimitedNode {
    scene: Scene,
    dialer: Dialer,
}

impl LimitedNode {
    /// Starts a node with two Services that have two backends each; `limit` sets the map sizes.
    fn with(dialer: Dialer, limit: impl FnOnce(&mut InstanceSettings)) -> Result<Self> {
        let scene = Scene::with(&["one", "two"], limit)?;
        scene.node.start()?;
        for (name, vip) in [("first", FIRST), ("second", SECOND)] {
            scene.node.apply(service(&scene, name, vip, dialer))?;
            until_backends(&scene.node, name, 2)?;
        }
        Ok(Self { scene, dialer })
    }

    fn refused_ports(&self, reason: &str) -> Result<u64> {
        let name = format!("culvert_unprogrammed_service_ports{{reason=\"{reason}\"}}");
        Ok(admin::metric(&self.scene.node.metrics()?, &name).unwrap_or(0))
    }

    fn expect_served(&self, vip: Vip) -> Result<()> {
        for sandbox in [self.scene.node.host(), &self.scene.client] {
            http_server_name(self.dialer.connect(sandbox, vip, HTTP)?)?;
        }
        Ok(())
    }
}

/// Applies a third Service, for which there are no free map entries. The status, the metrics and the log must
/// report the refusal, and the Service must be programmed once entries are free.
fn expect_third_refused(limited: &LimitedNode, reason: &str) -> Result<()> {
    let node = &limited.scene.node;

    node.apply(service(&limited.scene, "third", THIRD, limited.dialer))?;

    wait::until(CHANGE_TIMEOUT, || {
        limited.refused_ports(reason).is_ok_and(|count| count == 1)
    })
    .with_context(|| node.logs())?;
    let listed = node.culvert(&["services", "--output", "json"])?;
    let services: serde_json::Value = serde_json::from_str(&listed.stdout)?;
    let third = ports(&services, "third");
    ensure_eq("refused", &third[0]["reason"], reason)?;
    let table = node.culvert(&["services"])?.stdout;
    let line = table.lines().find(|line| line.contains("default/third"));
    ensure!(
        line.is_some_and(|line| line.contains("not programmed")),
        "{table}"
    );
    let is_reported = |line: &str| line.contains("default/third") && line.contains(reason);
    ensure!(node.logs().lines().any(is_reported), "{}", node.logs());
    let status = node.culvert(&["status"])?.stdout;
    ensure!(status.contains(reason), "{status}");
    limited
        .dialer
        .connect(node.host(), THIRD, HTTP)
        .expect_err("the third Service is not programmed");
    limited.expect_served(FIRST)?;
    limited.expect_served(SECOND)?;

    node.delete("first.yaml")?;
    until_gone(node, "first")?;
    until_backends(node, "third", 2)?;
    wait::until(CHANGE_TIMEOUT, || {
        limited.refused_ports(reason).is_ok_and(|count| count == 0)
    })?;
    limited.expect_served(SECOND)?;
    limited.expect_served(THIRD)?;
    limited
        .dialer
        .connect(node.host(), FIRST, HTTP)
        .expect_err("the first Service was removed");
    Ok(())
}

/// Runs [`expect_third_refused`] for each address family, with map sizes set by `limit`.
fn expect_third_refused_with(limit: impl Fn(&mut InstanceSettings), reason: &str) -> Result<()> {
    [Dialer::V4, Dialer::V6].into_iter().try_for_each(|dialer| {
        let limited = LimitedNode::with(dialer, &limit)?;
        expect_third_refused(&limited, reason).with_context(|| format!("{dialer:?}"))
    })
}

#[test]
fn a_service_without_a_free_frontend_entry_waits_for_one() -> Result<()> {
    expect_third_refused_with(|settings| settings.maps.frontends = 2, "frontends_full")
}

#[test]
#[ignore = "independent of the kernel: the map is an array, and the daemon assigns its indices"]
fn a_service_without_free_slots_waits_for_them() -> Result<()> {
    expect_third_refused_with(|settings| settings.maps.slots = 4, "slots_full")
}

#[test]
#[ignore = "independent of the kernel: the map is an array, and the daemon assigns its indices"]
fn a_service_without_free_backend_entries_waits_for_them() -> Result<()> {
    expect_third_refused_with(|settings| settings.maps.backends = 4, "backends_full")
}

#[test]
fn a_daemon_starts_on_maps_that_are_full() -> Result<()> {
    for dialer in [Dialer::V4, Dialer::V6] {
        let limited = LimitedNode::with(dialer, |settings| {
            settings.maps.frontends = 2;
            settings.maps.slots = 4;
            settings.maps.backends = 4;
        })?;
        for _ in 0..2 {
            limited.scene.node.kill9()?;
            limited.scene.node.start()?;
            limited.expect_served(FIRST)?;
            limited.expect_served(SECOND)?;
        }
    }
    Ok(())
}
