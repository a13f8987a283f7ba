//! Tests loads: the clients' reports must agree with the servers' records.

use std::{
    io::{Read as _, Write as _},
    slice,
    sync::Arc,
    time::Duration,
};

use anyhow::Result;
use tunnel_tests::{
    load::{Plan, Report, race, tcp, udp, udp::Mode},
    node_network::NodeNetwork,
    pod::Pod,
    sandbox::COMMAND_TIMEOUT,
    server::{Listener, ServerKind},
};

const DURATION: Duration = Duration::from_millis(300);

fn client_and_server() -> Result<(NodeNetwork, Arc<Pod>, Arc<Pod>)> {
    let network = NodeNetwork::new()?;
    let (client, server) = (network.pod("client")?, network.pod("server")?);
    Ok((network, client, server))
}

#[test]
fn a_load_reports_what_the_server_recorded() -> Result<()> {
    let (_network, client, server) = client_and_server()?;
    let serving = server.serve(&[Listener::new(ServerKind::Http, 80).for_service("web")])?;
    let mut plan = Plan::new(server.addr_v4(80), 500, DURATION).for_service("web");
    plan.to.push(server.addr_v6(80));

    let report = tcp::run(&plan, &|domain, kind| client.socket(domain, kind));

    assert_eq!(
        (report.attempts, report.failed(), report.other_peer),
        (150, 0, 0),
        "{report:?}"
    );
    let counts = serving.record()?.ports["http:80"];
    assert_eq!(
        (counts.accepted, counts.answered, counts.foreign),
        (150, 150, 0)
    );
    assert_eq!(report.servers["server"].count, 150);
    Ok(())
}

#[test]
fn a_load_process_in_a_pod_reports_the_same() -> Result<()> {
    let (_network, client, server) = client_and_server()?;
    let serving = server.serve_http(80)?;

    let output = client
        .lab_command(&["load", "tcp"])?
        .option("--to", server.addr_v6(80))
        .option("--rate", 500)
        .option("--millis", 300)
        .cpu(0)
        .start()?
        .finish(COMMAND_TIMEOUT)?;
    let report: Report = output.parse_report()?;

    assert_eq!((report.answered, report.failed()), (150, 0));
    assert_eq!(serving.record()?.total().answered, 150);
    Ok(())
}

#[test]
fn failures_have_the_name_of_the_error_and_the_step() -> Result<()> {
    let (_network, client, server) = client_and_server()?;
    let plan = Plan::new(server.addr_v4(81), 100, DURATION);
    let sockets = |domain, kind| client.socket(domain, kind);

    let tcp = tcp::run(&plan, &sockets);
    let udp = udp::run(&plan, Mode::Connected, &sockets);

    for (report, failure) in [
        (tcp, "ECONNREFUSED at connect"),
        (udp, "ECONNREFUSED at answer"),
    ] {
        assert_eq!(report.failures.keys().collect::<Vec<_>>(), [failure]);
        assert_eq!(report.failed(), 30, "{failure}");
    }
    Ok(())
}

#[test]
fn a_connect_that_nobody_answers_times_out() -> Result<()> {
    let (_network, client, server) = client_and_server()?;
    server.run(&["ip", "link", "set", "eth0", "down"])?;
    let mut plan = Plan::new(server.addr_v4(80), 1, Duration::from_secs(1));
    plan.workers = 1;

    let report = tcp::run(&plan, &|domain, kind| client.socket(domain, kind));

    let failures: Vec<_> = report.failures.keys().map(String::as_str).collect();
    assert!(
        matches!(
            failures[..],
            ["TimedOut at connect" | "EHOSTUNREACH at connect"]
        ),
        "{failures:?}"
    );
    Ok(())
}

#[test]
fn datagrams_are_answered_with_name_and_payload() -> Result<()> {
    let (_network, client, server) = client_and_server()?;
    let serving = server.serve(&[Listener::new(ServerKind::Udp, 53).for_service("dns")])?;
    let sockets = |domain, kind| client.socket(domain, kind);

    for (to, service) in [(server.addr_v4(53), "dns"), (server.addr_v6(53), "web")] {
        for mode in [Mode::Connected, Mode::Unconnected] {
            let plan = Plan::new(to, 100, DURATION).for_service(service);
            let report = udp::run(&plan, mode, &sockets);
            assert_eq!((report.answered, report.other_peer), (30, 0), "{report:?}");
        }
    }

    let counts = serving.record()?.total();
    assert_eq!((counts.answered, counts.foreign), (120, 60));
    Ok(())
}

#[test]
fn an_echo_server_sends_back_what_it_gets() -> Result<()> {
    let (_network, client, server) = client_and_server()?;
    let _serving = server.serve_echo(7)?;

    let mut stream = client.connect(server.addr_v4(7))?;
    stream.write_all(b"ping")?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer)?;

    assert_eq!(&answer, b"ping");
    Ok(())
}

#[test]
fn race_clients_send_the_intended_service_and_misrouted_datagrams_count_as_foreign() -> Result<()> {
    let (network, client, server) = client_and_server()?;
    // The server itself has the Services' addresses, so no translation is needed.
    for last in [200, 201] {
        let via = server.v4();
        let route = format!("route add 10.1.0.{last}/32 via {via} dev pod2 onlink");
        network.host().ip(&route)?;
        server.ip(&format!("addr add 10.1.0.{last}/32 dev eth0"))?;
    }
    let services = Listener::new(ServerKind::Udp, 53)
        .for_service("svc-0")
        .for_service("svc-1");

    for (options, stem, is_astray) in [
        (&["--reconnect"][..], "svc", false),
        (&[], "svc", false),
        (&[], "other", true),
    ] {
        let serving = server.serve(slice::from_ref(&services))?;
        let output = client
            .lab_command(&[&["race-read"], options].concat())?
            .option("--first", "10.1.0.200:53")
            .option("--count", 2)
            .option("--millis", 200)
            .option("--stem", stem)
            .start()?
            .finish(COMMAND_TIMEOUT)?;
        let report: race::Report = output.parse_report()?;
        let counts = serving.record()?.total();

        assert!(report.connects > 1000 && report.sent > 0, "{report:?}");
        assert!(counts.answered > 0, "{stem} {options:?}: {counts:?}");
        let foreign = if is_astray { counts.answered } else { 0 };
        assert_eq!(counts.foreign, foreign, "{stem} {options:?}");
    }
    Ok(())
}
