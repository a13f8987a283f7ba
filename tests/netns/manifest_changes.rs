//! Tests manifest changes while the daemon is running, and the daemon's HTTP endpoints.

use std::net::{Ipv6Addr, SocketAddr};

use anyhow::{Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    admin::metric,
    culvert_instance::{Instance, NODE_NAME},
    manifest::Manifest,
    node::Node,
    wait,
};

use crate::{
    fixture::{OTHER, Scene, WEB},
    support::{
        CHANGE_TIMEOUT, Dialer, HTTP, Vip, ensure_eq, errno, http_get, until_backends, until_eq,
        until_gone,
    },
};

/// Returns the problems with manifests, as listed in the daemon's status.
fn problems(node: &Node) -> Vec<String> {
    let status = node.status().unwrap_or_default();
    let problems = status["source"]["problems"].as_array().cloned();
    let text = |problem: serde_json::Value| problem.to_string();
    problems.unwrap_or_default().into_iter().map(text).collect()
}

/// Connects with every TCP dialer. The same server must answer all connections; its name is returned.
fn dial_all(node: &Node, vip: Vip) -> Result<String> {
    let client = node.pod("client")?;
    let name = Dialer::V4.dial(&client, vip, HTTP)?;
    for dialer in [Dialer::V6, Dialer::Mapped] {
        dialer.expect_served(&client, vip, HTTP, &name)?;
    }
    Ok(name)
}

#[test]
#[ignore = "independent of the kernel: documents and error messages"]
fn a_bad_document_is_named_while_the_rest_applies_and_the_last_good_version_stays() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let node = &scene.node;
    let good = WEB
        .service("web")
        .backends(scene.all_addresses())
        .to_string();
    let other = OTHER
        .service("other")
        .backends(scene.all_addresses())
        .to_string();
    // The Service's first port is now invalid, and its file contains a second Service.
    let bad = good.replacen("port: 80,", "port: 80000,", 1);
    ensure!(bad != good);

    node.apply(("web.yaml", &*format!("{bad}{other}")))?;

    until_backends(node, "other", 1)?;
    wait::until(CHANGE_TIMEOUT, || problems(node).len() == 1)?;
    let problem = problems(node).concat();
    let table = node.culvert(&["status"])?.stdout;
    for word in ["web.yaml", "Service default/web", "spec.ports[0].port"] {
        ensure!(problem.contains(word), "no {word} in {problem}");
        ensure!(table.contains(word), "no {word} in {table}");
    }
    ensure!(problem.contains("80000"), "{problem}");
    ensure_eq("refused", node.reason_count("object_rejected")?, 1)?;
    ensure_eq("server", dial_all(node, OTHER)?, "backend")?;
    ensure_eq("server", dial_all(node, WEB)?, "backend")?;
    ensure!(node.is_ready());

    // An unparsable file is listed as a separate problem, and does not affect any Service either.
    node.apply(("broken.yaml", "kind: [Service\n"))?;
    wait::until(CHANGE_TIMEOUT, || {
        problems(node).iter().any(|it| it.contains("broken.yaml"))
    })?;
    ensure_eq("server", dial_all(node, WEB)?, "backend")?;

    node.apply(("web.yaml", &*format!("{good}{other}")))?;
    node.delete("broken.yaml")?;
    wait::until(CHANGE_TIMEOUT, || problems(node).is_empty())?;
    ensure_eq("server", dial_all(node, WEB)?, "backend")
}

#[test]
fn a_service_is_created_changed_and_deleted_with_its_manifest() -> Result<()> {
    let scene = Scene::prepare_web(&["backend", "second"], &["backend"])?;
    let (node, client) = (&scene.node, &scene.client);
    node.start()?;
    let other_leads_to = |names: &[&str]| -> Result<()> {
        scene.apply_service(OTHER, "other", names)?;
        until_backends(node, "other", names.len())
    };

    other_leads_to(&["backend"])?;
    ensure_eq("server", dial_all(node, OTHER)?, "backend")?;

    other_leads_to(&["backend", "second"])?;
    other_leads_to(&["second"])?;
    ensure_eq("server", dial_all(node, OTHER)?, "second")?;

    node.apply(OTHER.service("other"))?;
    until_backends(node, "other", 0)?;
    for dialer in Dialer::TCP {
        let refused = errno(dialer.connect(client, OTHER, HTTP));
        ensure_eq("error", refused, Errno::ECONNREFUSED)?;
    }

    node.delete("other.yaml")?;
    until_gone(node, "other")?;
    for dialer in Dialer::TCP {
        let failed = errno(dialer.connect(client, OTHER, HTTP));
        ensure!(failed != Errno::ECONNREFUSED, "still refused: {dialer:?}");
    }
    ensure_eq("server", dial_all(node, WEB)?, "backend")
}

/// Asserts that kube-proxy's sync metrics exist for both address families.
fn expect_sync_metrics(metrics: &str) -> Result<()> {
    for family in ["IPv4", "IPv6"] {
        // Only the test's Service is counted, not the Service that the daemon uses to probe its data path.
        for (name, most) in [
            ("sync_proxy_rules_duration_seconds_count", u64::MAX),
            ("sync_full_proxy_rules_duration_seconds_count", u64::MAX),
            ("sync_proxy_rules_service_changes_total", 1),
            ("sync_proxy_rules_endpoint_changes_total", u64::MAX),
            ("sync_proxy_rules_last_timestamp_seconds", u64::MAX),
            ("sync_proxy_rules_last_queued_timestamp_seconds", u64::MAX),
        ] {
            let name = format!("kubeproxy_{name}{{ip_family=\"{family}\"}}");
            let value = metric(metrics, &name).unwrap_or_default();
            let as_expected = (1..=most).contains(&value);
            ensure!(
                as_expected,
                "{name} is {value}, expected 1 to {most}, in {metrics}"
            );
        }
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: HTTP servers"]
fn health_and_metrics_are_served_on_their_ports() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let node = &scene.node;
    let admin = SocketAddr::from(([127, 0, 0, 1], 10249));
    let healthz = SocketAddr::from(([127, 0, 0, 1], 10256));
    let get_from_host = |at: SocketAddr, path: &str| http_get(node.host(), at, path);
    dial_all(node, WEB)?;

    let (code, metrics) = get_from_host(admin, "/metrics")?;
    ensure_eq("code", code, 200)?;
    ensure_eq("ready", metric(&metrics, "culvert_ready"), Some(1))?;
    let translated = "culvert_reason_total{reason=\"translated\"}";
    // One connection per dialer, plus the one made by the daemon's probe of its data path.
    let connects = u64::try_from(Dialer::TCP.len())? + 1;
    ensure_eq("translated", metric(&metrics, translated), Some(connects))?;
    expect_sync_metrics(&metrics)?;
    let (code, status) = get_from_host(admin, "/status")?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    ensure_eq("status", (code, &status["ready"]), (200, &true.into()))?;
    let (code, config) = get_from_host(admin, "/configz")?;
    let config: serde_json::Value = serde_json::from_str(&config)?;
    let named = &config["culvert.dev"]["nodeName"];
    ensure_eq("config", (code, named), (200, &NODE_NAME.into()))?;
    ensure_eq(
        "metrics at healthz",
        get_from_host(healthz, "/metrics")?.0,
        404,
    )?;
    for at in [healthz, SocketAddr::from((Ipv6Addr::LOCALHOST, 10256))] {
        for path in ["/healthz", "/livez"] {
            let (code, health) = get_from_host(at, path)?;
            let health: serde_json::Value = serde_json::from_str(&health)?;
            ensure_eq(path, (code, &health["healthy"]), (200, &true.into()))?;
        }
    }
    ensure_eq("server", dial_all(node, WEB)?, "backend")
}

#[test]
#[ignore = "independent of the kernel: HTTP servers"]
fn a_node_about_to_be_deleted_is_alive_but_not_healthy_for_new_traffic() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let node = &scene.node;
    let healthz = SocketAddr::from(([127, 0, 0, 1], 10256));
    let get_from_host = |path: &str| http_get(node.host(), healthz, path);
    let until_healthz = |code: u16| until_eq("healthz", code, || Ok(get_from_host("/healthz")?.0));

    let Manifest { file, text } = Instance::node().into();
    let taint = "spec: { taints: [{ key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule }] }\n";
    node.apply((&*file, &*format!("{text}{taint}")))?;
    until_healthz(503)?;
    ensure_eq("livez", get_from_host("/livez")?.0, 200)?;
    // Remove the taint, then delete the Node object.
    node.apply((&*file, &*text))?;
    until_healthz(200)?;
    node.delete(&file)?;
    until_healthz(503)?;
    ensure_eq("livez", get_from_host("/livez")?.0, 200)?;
    ensure_eq("server", dial_all(node, WEB)?, "backend")
}
