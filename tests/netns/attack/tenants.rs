//! A tenant who may create Services and EndpointSlices in a namespace of its own. The tenant's Services must not
//! use up the maps or the daemon's memory, so that the Services of other namespaces are programmed and served.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::{admin, clock, load_scale::LoadScale, manifest::Manifest, process_usage, wait};

use crate::{
    fixture::{OTHER, Scene, WEB},
    support::{CHANGE_TIMEOUT, Dialer, ensure_eq, ports, until_backends},
};

/// The namespace of the tenant.
const TENANT: &str = "tenant";

/// The maximum memory of the daemon while a tenant's Services exist, and the maximum that remains of it.
const MAX_MEMORY: u64 = 150 << 20;
const MAX_REMAINING: u64 = 40 << 20;

/// The maximum memory that the daemon takes, in addition, for a list of a tenant's Service.
const MAX_LIST_MEMORY: usize = 8 << 20;

/// The time between two changes in full maps, in which each load reaches all backends.
const HOLD: Duration = Duration::from_millis(200);

/// Builds one of the tenant's Services, with the given algorithm and numbers of ports and endpoints.
fn tenant_service(number: u8, algorithm: &str, port_count: u16, endpoints: u8) -> Manifest {
    tenant_service_with((number, number), algorithm, port_count, endpoints)
}

/// Builds one of the tenant's Services, with endpoints in the network 10.243.`net`.
fn tenant_service_with(
    (number, net): (u8, u8),
    algorithm: &str,
    port_count: u16,
    endpoints: u8,
) -> Manifest {
    let name = format!("{TENANT}-{number}");
    let metadata = json!({
        "name": name,
        "namespace": TENANT,
        "annotations": {"culvert.dev/algorithm": algorithm},
    });
    let ip = format!("10.97.0.{number}");
    let port =
        |target: u16| move |port: u16| json!({"name": format!("p{port}"), "port": port + target});
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": ip,
            "clusterIPs": [ip],
            "ports": (1..=port_count).map(port(0)).collect::<Vec<_>>(),
        },
    });
    let address = |last: u8| json!({"addresses": [format!("10.243.{net}.{last}")]});
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": TENANT,
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": (1..=port_count).map(port(8000)).collect::<Vec<_>>(),
        "endpoints": (1..=endpoints).map(address).collect::<Vec<_>>(),
    });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [service, slice]});
    Manifest::from((&*format!("{name}.json"), &*list.to_string()))
}

/// Returns how many of the tenant's Services the daemon lists, and how many ports they have.
fn tenant_ports(scene: &Scene) -> Result<(usize, usize)> {
    let services = scene.node.services()?;
    let services = services.as_array().into_iter().flatten();
    let of_tenant = services.filter(|service| service["namespace"] == TENANT);
    let counts = of_tenant.map(|service| service["ports"].as_array().map_or(0, Vec::len));
    let counts: Vec<_> = counts.collect();
    Ok((counts.len(), counts.iter().sum()))
}

/// Asserts that the status, the metrics and the list of Services name the tenant and the reason, and that the
/// node is ready nevertheless.
fn expect_tenant_named(scene: &Scene) -> Result<()> {
    let node = &scene.node;
    let name = format!("culvert_service_ports_beyond_share{{namespace=\"{TENANT}\"}}");
    let refused = admin::metric(&node.metrics()?, &name);
    ensure!(refused.is_some_and(|count| count > 0), "{refused:?}");
    let status = node.culvert(&["status"])?;
    for part in [
        &*format!("namespace {TENANT}: "),
        "service.namespaceShare",
        "ready",
    ] {
        ensure!(
            status.stdout.contains(part),
            "no `{part}` in {}",
            status.stdout
        );
    }
    let ready = admin::get(&node.admin_socket(), "/readyz")?;
    ensure_eq(
        "/readyz",
        (ready.status, &*ready.body),
        (200, r#"{"ready":true}"#),
    )?;
    let table = node.culvert(&["services"])?.stdout;
    let part = format!("namespace {TENANT} uses ");
    ensure!(table.contains(&part), "no `{part}` in {table}");
    let is_logged = |line: &str| line.contains(TENANT) && line.contains("namespace_share_exceeded");
    ensure!(node.logs().lines().any(is_logged), "{}", node.logs());
    Ok(())
}

/// Returns the ports of a Service, as `/services` shows them.
fn listed_ports(scene: &Scene, name: &str) -> Result<Vec<Value>> {
    Ok(ports(&scene.node.services()?, name))
}

#[test]
#[ignore = "independent of the kernel: the daemon's memory"]
fn a_tenants_services_use_little_memory_and_return_it() -> Result<()> {
    const SERVICES: u8 = 30;
    const PORTS: u16 = 1000;

    let scene = Scene::web(&["one", "two"])?;
    let (node, servers) = (&scene.node, &["one", "two"][..]);
    until_backends(node, "web", 2)?;
    let daemon = node.daemon_pid().context("the daemon doesn't run")?;
    let before = process_usage::resident_memory(daemon)?;

    scene.under_load(&[(WEB, servers)], 1, |round| {
        if round > 0 {
            return Ok(());
        }
        for number in 1..=SERVICES {
            node.apply(tenant_service(number, "maglev", PORTS, 170))?;
        }
        // The victim's second Service is programmed among the tenant's.
        scene.apply_service(OTHER, "other", servers)?;
        until_backends(node, "other", 2)?;
        let all = (
            usize::from(SERVICES),
            usize::from(SERVICES) * usize::from(PORTS),
        );
        wait::until(CHANGE_TIMEOUT, || {
            tenant_ports(&scene).is_ok_and(|found| found == all)
        })
    })?;

    expect_tenant_named(&scene)?;
    let peak = process_usage::peak_memory(daemon)?;
    ensure!(peak < MAX_MEMORY, "the daemon used {peak} bytes");
    // The daemon creates the list of a Service with very many endpoints while it sends it.
    let before_list = process_usage::resident_memory(daemon)?;
    let path = format!("/services?name={TENANT}-1");
    let list = admin::get(&node.admin_socket(), &path)?.body.len();
    ensure!(list > 4 * MAX_LIST_MEMORY, "the list has only {list} bytes");
    let after_list = process_usage::resident_memory(daemon)?;
    let grown = after_list.saturating_sub(before_list);
    ensure!(
        grown < u64::try_from(MAX_LIST_MEMORY)?,
        "a list of {list} bytes took {grown} bytes of the daemon's memory"
    );
    for number in 1..=SERVICES {
        node.delete(&format!("{TENANT}-{number}.json"))?;
    }
    let mut now = 0;
    wait::until(CHANGE_TIMEOUT, || {
        now = process_usage::resident_memory(daemon).unwrap_or(u64::MAX);
        now < before + MAX_REMAINING
    })
    .with_context(|| format!("{now} bytes remain of {peak}; before: {before}"))?;
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the maps are arrays, and the daemon assigns their indices"]
fn a_tenant_that_fills_its_share_leaves_room_for_others() -> Result<()> {
    let scene = Scene::with(&["one", "two", "three", "four", "five"], |settings| {
        settings.maps.frontends = 64;
        settings.maps.slots = 400;
        settings.maps.backends = 400;
    })?;
    let node = &scene.node;
    node.start()?;
    for number in 1..=10 {
        node.apply(tenant_service(number, "random", 4, 20))?;
    }
    wait::until(CHANGE_TIMEOUT, || {
        tenant_ports(&scene).is_ok_and(|found| found == (10, 40))
    })?;

    scene.apply_web(&["one", "two"])?;
    until_backends(node, "web", 2)?;
    let all = ["one", "two", "three", "four", "five"];
    scene.under_load(&[(WEB, &all)], 6, |round| {
        let now = if round % 2 == 0 { &all[2..] } else { &all[..2] };
        scene.apply_web(now)?;
        until_backends(node, "web", now.len())
    })?;

    expect_tenant_named(&scene)
}

#[test]
#[ignore = "independent of the kernel: the daemon assigns the indices; open_connections tests the counts"]
fn a_tenant_that_replaces_many_backends_with_open_sockets_leaves_room_for_others() -> Result<()> {
    const PORTS: u16 = 10;
    const ENDPOINTS: u8 = 20;
    // The tenant may use half of the 400 entries, and half of the 114 spare ones.
    const MOST: u64 = 200 + 57;

    let all = ["one", "two", "three", "four", "five"];
    let scene = Scene::with(&all, |settings| {
        settings.maps.slots = 800;
        settings.maps.backends = 400;
    })?;
    let node = &scene.node;
    node.start()?;
    let [_, (_, client)] = scene.sandboxes();
    let mut sockets = Vec::new();
    for net in 1..=3 {
        let last = format!("10.243.{net}.");
        node.apply(tenant_service_with(
            (1, net),
            "round-robin",
            PORTS,
            ENDPOINTS,
        ))?;
        wait::until(CHANGE_TIMEOUT, || {
            let ports = listed_ports(&scene, "tenant-1").unwrap_or_default();
            let is_new = |endpoint: &Value| {
                let endpoint = endpoint["endpoint"].as_str().unwrap_or_default();
                endpoint.starts_with(&last)
            };
            let has_new = |port: &Value| {
                let endpoints = port["endpoints"].as_array().into_iter().flatten();
                endpoints.into_iter().any(is_new)
            };
            ports.len() == usize::from(PORTS) && ports.iter().all(has_new)
        })?;
        // In turn, the sockets get every backend of a port. They count as open, although no backend answers.
        for port in 1..=PORTS {
            for _ in 0..ENDPOINTS {
                let socket = Dialer::V4.tcp_socket(client)?;
                socket.set_nonblocking(true)?;
                let address = SocketAddr::from(([10, 97, 0, 1], port));
                drop(socket.connect(&address.into()));
                sockets.push(socket);
            }
        }
    }
    let occupied = || -> Result<u64> {
        let ports = listed_ports(&scene, "tenant-1")?;
        let backends = ports
            .iter()
            .map(|port| port["backends"].as_array().map_or(0, Vec::len));
        let draining = node.status()?["programmed"]["drainingBackends"].as_u64();
        Ok(u64::try_from(backends.sum::<usize>())? + draining.context("no drainingBackends")?)
    };
    let mut found = 0;
    wait::until(CHANGE_TIMEOUT, || {
        found = occupied().unwrap_or(0);
        found > 200
    })
    .with_context(|| format!("{found} entries are occupied"))?;
    ensure!(found <= MOST, "the tenant occupies {found} entries");

    scene.apply_web(&["one", "two"])?;
    until_backends(node, "web", 2)?;
    scene.under_load(&[(WEB, &all)], 4, |round| {
        let now = if round % 2 == 0 { &all[2..] } else { &all[..2] };
        scene.apply_web(now)?;
        until_backends(node, "web", now.len())
    })?;
    let found = occupied()?;
    ensure!(found <= MOST, "the tenant occupies {found} entries");
    expect_tenant_named(&scene)
}

#[test]
fn a_rolling_change_in_full_maps_fails_no_connection() -> Result<()> {
    let scene = Scene::with(&["one", "two", "three", "four", "five"], |settings| {
        // Room for two endpoints of each of the two ports in each family.
        settings.maps.backends = 8;
    })?;
    let node = &scene.node;
    node.start()?;
    scene.apply_web(&["one", "two"])?;
    until_backends(node, "web", 2)?;

    // The fifth server never gets a connection. Each pair is completely in the maps only between two changes.
    let hold = LoadScale::from_environment().timeout(HOLD);
    scene.under_load(&[(WEB, &["one", "two", "three", "four"])], 4, |round| {
        if round % 2 == 0 {
            scene.apply_web(&["three", "four", "five"])?;
            let is_left_out = |port: &Value| {
                let problem = port["problem"].as_str().unwrap_or_default();
                problem.contains("2 of 3 endpoints are programmed")
            };
            wait::until(CHANGE_TIMEOUT, || {
                let ports = listed_ports(&scene, "web").unwrap_or_default();
                ports.len() == 4 && ports.iter().all(is_left_out)
            })
            .with_context(|| format!("{:?}", listed_ports(&scene, "web")))?;
        } else {
            scene.apply_web(&["one", "two"])?;
            wait::until(CHANGE_TIMEOUT, || {
                let ports = listed_ports(&scene, "web").unwrap_or_default();
                ports.len() == 4 && ports.iter().all(|port| port["problem"].is_null())
            })?;
        }
        clock::pause(hold);
        Ok(())
    })?;

    scene.apply_web(&["three", "four", "five"])?;
    let is_unprogrammed = |endpoint: &Value| endpoint["status"] == "not programmed: backends_full";
    wait::until(CHANGE_TIMEOUT, || {
        listed_ports(&scene, "web")
            .unwrap_or_default()
            .iter()
            .all(|port| {
                let endpoints = port["endpoints"].as_array().into_iter().flatten();
                endpoints
                    .filter(|endpoint| is_unprogrammed(endpoint))
                    .count()
                    == 1
            })
    })?;
    let table = node.culvert(&["backends"])?.stdout;
    ensure!(table.contains("not programmed: backends_full"), "{table}");
    let ready = admin::get(&node.admin_socket(), "/readyz")?;
    ensure!(
        ready.status == 503 && ready.body.contains("bpf.maps.backends is used up"),
        "{ready:?}"
    );
    Ok(())
}
