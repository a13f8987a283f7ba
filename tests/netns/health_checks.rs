//! Tests Services' health check ports with HTTP requests like a load balancer's, sent both from the node and
//! from outside.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance::{InstanceSettings, NODE_NAME},
    manifest::Service,
    node::Node,
    sandbox::Sandbox,
    wait,
};

use crate::{
    fixture::{OTHER, TWIN, WEB},
    support::{CHANGE_TIMEOUT, HOST, Vip, addresses, http_get, until_eq},
};

const PORT: u16 = 32_100;

/// Builds a Service of type LoadBalancer with `externalTrafficPolicy: Local` and a health check port.
fn service(name: &str, vip: Vip, port: u16) -> Service {
    vip.service(name)
        .of_type("LoadBalancer")
        .spec("externalTrafficPolicy: Local")
        .spec(&format!("healthCheckNodePort: {port}"))
}

/// Waits until the health check port reports, over IPv4 and IPv6, `local` as the number of the Service's
/// local endpoints.
fn until_reported(
    node: &Node,
    sandbox: &Sandbox,
    port: u16,
    name: &str,
    local: usize,
) -> Result<()> {
    for ip in HOST.ips() {
        let code = if local > 0 { 200 } else { 503 };
        let response = || {
            let (code, body) = http_get(sandbox, SocketAddr::new(ip, port), "/")?;
            let body: serde_json::Value = serde_json::from_str(&body)?;
            let response = ["localEndpoints", "serviceProxyHealthy"].map(|key| body[key].clone());
            Ok((code, body["service"]["name"].clone(), response))
        };
        let expected = (code, name.into(), [local.into(), true.into()]);
        until_eq(&format!("{ip}, port {port}"), expected, response)
            .with_context(|| format!("{:?}", node.status()))?;
    }
    Ok(())
}

fn until_closed(sandbox: &Sandbox, port: u16) -> Result<()> {
    for ip in HOST.ips() {
        wait::until(CHANGE_TIMEOUT, || {
            sandbox.connect(SocketAddr::new(ip, port)).is_err()
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: HTTP servers"]
fn a_health_check_port_reports_the_ready_endpoints_of_its_node_while_its_service_exists()
-> Result<()> {
    let node = Node::new()?;
    let (one, two) = (node.pod("one")?, node.pod("two")?);
    let sandboxes = [node.host(), node.outside()];
    let elsewhere = service("web", WEB, PORT)
        .on_node("node-b")
        .backends(addresses(&[&*one]));
    node.apply(elsewhere)?;
    node.start()?;
    for sandbox in sandboxes {
        until_reported(&node, sandbox, PORT, "web", 0)?;
    }

    let both = addresses(&[&*one, &*two]);
    node.apply(
        service("web", WEB, PORT)
            .on_node(NODE_NAME)
            .backends(both.clone()),
    )?;
    for sandbox in sandboxes {
        until_reported(&node, sandbox, PORT, "web", 2)?;
    }
    // Terminating endpoints may still receive traffic when no others are left, but load balancers must stop
    // sending traffic to this node.
    let going = service("web", WEB, PORT).on_node(NODE_NAME);
    node.apply(both.into_iter().fold(going, Service::terminating))?;
    until_reported(&node, node.outside(), PORT, "web", 0)?;

    node.apply(service("web", WEB, PORT + 1).on_node(NODE_NAME))?;
    until_reported(&node, node.outside(), PORT + 1, "web", 0)?;
    until_closed(node.outside(), PORT)?;
    node.delete("web.yaml")?;
    until_closed(node.outside(), PORT + 1)
}

#[test]
#[ignore = "independent of the kernel: HTTP servers"]
fn an_occupied_health_check_port_is_reported_and_served_once_it_is_free() -> Result<()> {
    let settings = InstanceSettings {
        node_ports: "nodePortAddresses: []".to_owned(),
        ..InstanceSettings::from_environment()?
    };
    let node = Node::with_settings(settings)?;
    let one = node.pod("one")?;
    let local = |name, vip, port| {
        let service = service(name, vip, port).on_node(NODE_NAME);
        service.backends(addresses(&[&*one]))
    };
    let taken = node
        .host()
        .listen(SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)))?;
    node.apply(local("web", WEB, PORT))?;
    node.apply(local("other", OTHER, PORT + 1))?;
    node.apply(local("third", TWIN, PORT + 1))?;
    node.start()?;

    until_reported(&node, node.outside(), PORT + 1, "other", 1)?;
    let refused = || {
        let status = node.status().unwrap_or_default();
        status["healthChecks"]["unserved"].to_string()
    };
    wait::until(CHANGE_TIMEOUT, || {
        refused().contains("belongs to default/other") && refused().contains("default/web")
    })?;
    ensure!(node.is_ready());
    let table = node.culvert(&["status"])?.stdout;
    let problem = "default/web: health check port 32100: Address";
    ensure!(table.contains(problem), "{table}");
    ensure!(node.reason_count("health_port_in_use")? >= 2);

    drop(taken);
    until_reported(&node, node.outside(), PORT, "web", 1)?;
    wait::until(CHANGE_TIMEOUT, || !refused().contains("default/web"))
}
