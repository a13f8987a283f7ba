//! Tests the event log of kernel programs, which they write only while the config enables it.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aya::{maps::MapInfo, programs::loaded_programs};
use socket2::{Domain, Type};
use tunnel_common::table::{GUARD, PROGRAMS, REASON_COUNTS};
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    manifest::{Protocol, Service},
    node::Node,
    node_network::OUTSIDE_V4,
    sandbox::connect_within,
    tunnel_testbed::TunnelTestbed,
    wait,
};

use crate::{
    fixture::{EMPTY, Scene, WEB, configure},
    service_addresses::NODE_HTTP,
    support::{
        CHANGE_TIMEOUT, DNS, Dialer, HOST, HTTP, HTTP_TARGET, Vip, ensure_eq, maps_directory,
        until_eq,
    },
};

/// An address that belongs to no Service.
const UNUSED: Vip = Vip::of(99);

/// The name of the ring buffer map for log events. Only programs that log events use it.
const LOG_MAP: &str = "AYA_LOGS";

/// Enables the log for the given program at the given level, or disables the log if `program` is `None`. The
/// change takes effect when the daemon next starts.
fn configure_log(node: &Node, program: Option<(&str, &str)>) -> Result<()> {
    let log = program
        .map(|(program, level)| format!("{{ kernel: {{ program: {program}, level: {level} }} }}"));
    configure(node, "log", log.as_deref().unwrap_or("{}"))
}

/// Returns the lines in the daemon's log that come from kernel programs.
fn kernel_lines(node: &Node) -> Vec<String> {
    let logs = node.logs();
    let lines = logs.lines().filter(|line| line.contains(" kernel: "));
    lines.map(str::to_owned).collect()
}

/// Waits until a kernel program logs a line that contains all of the given words, and returns that line.
fn until_logged(node: &Node, words: &[&str]) -> Result<String> {
    let line = |lines: Vec<String>| {
        let mut lines = lines.into_iter();
        lines.find(|line| words.iter().all(|word| line.contains(word)))
    };
    wait::until_some(CHANGE_TIMEOUT, || line(kernel_lines(node)))
        .with_context(|| format!("no line with {words:?} in {:#?}", kernel_lines(node)))
}

/// Creates a node with two Services, one of them without a backend, but does not start the daemon.
fn prepared() -> Result<Scene> {
    let scene = Scene::prepare_web(&["backend"], &["backend"])?;
    scene.node.apply(EMPTY.service("empty"))?;
    Ok(scene)
}

impl Scene {
    fn connect(&self) -> Result<()> {
        for dialer in [Dialer::V4, Dialer::V6] {
            dialer.expect_served(&self.client, WEB, HTTP, "backend")?;
        }
        Ok(())
    }

    /// Returns the names of the loaded programs that log events and use this node's maps. The kernel unloads
    /// a program shortly after its last link is gone.
    fn logging_programs(&self) -> Result<Vec<String>> {
        let count = MapInfo::from_pin(
            self.node
                .bpffs()
                .join(maps_directory(""))
                .join(REASON_COUNTS.name),
        )?
        .id();
        let mut names = Vec::new();
        for program in loaded_programs().filter_map(Result::ok) {
            // Other tests load and unload programs at the same time.
            let Ok(Some(maps)) = program.map_ids() else {
                continue;
            };
            let is_ring = |id: &u32| {
                MapInfo::from_id(*id).is_ok_and(|map| map.name_as_str() == Some(LOG_MAP))
            };
            if maps.contains(&count) && maps.iter().any(is_ring) {
                names.extend(program.name_as_str().map(str::to_owned));
            }
        }
        Ok(names)
    }

    fn until_logging(&self, expected: &[&str]) -> Result<()> {
        until_eq("programs with a log", expected, || self.logging_programs())
    }
}

#[test]
fn a_connect_is_logged_with_its_destination_and_backend_while_the_log_is_enabled() -> Result<()> {
    expect_connects_logged(Dialer::V4, "connect4")
}

#[test]
#[ignore = "independent of the kernel: logged like IPv4 connects"]
fn a_connect_over_ipv6_is_logged_with_its_destination_and_backend_while_the_log_is_enabled()
-> Result<()> {
    expect_connects_logged(Dialer::V6, "connect6")
}

fn expect_connects_logged(dialer: Dialer, program: &str) -> Result<()> {
    let scene = prepared()?;
    scene.node.start()?;
    scene.connect()?;
    ensure_eq(
        "programs with a log by default",
        scene.logging_programs()?,
        [""; 0],
    )?;
    ensure_eq("status", scene.node.status()?["kernelLog"].is_null(), true)?;

    configure_log(&scene.node, Some((program, "debug")))?;
    scene.node.restart()?;
    ensure_eq("log lines by default", kernel_lines(&scene.node), [""; 0])?;
    scene.until_logging(&[program])?;
    scene.connect()?;
    let web = dialer.address(WEB, HTTP).ip();
    let destination = format!("destination={web} port={HTTP} protocol=TCP");
    let backend = format!(
        "backend={} backend_port={HTTP_TARGET} reason=translated",
        scene.backend("backend")?.address(dialer.family())
    );
    let line = until_logged(
        &scene.node,
        &["DEBUG kernel: translated", &destination, &backend],
    )?;
    ensure!(line.contains(program), "{line}");
    ensure!(dialer.connect(&scene.client, EMPTY, HTTP).is_err());
    let empty = format!("destination={} ", dialer.address(EMPTY, HTTP).ip());
    until_logged(&scene.node, &["refused", &empty, "reason=no_backend"])?;
    // Connections to addresses that belong to no Service are logged only at level `trace`.
    ensure!(dialer.connect(&scene.client, UNUSED, HTTP).is_err());
    let status = scene.node.culvert(&["status"])?.stdout;
    ensure!(status.contains(&format!("{program}, debug")), "{status}");

    // Stopping the daemon ends the log. A daemon whose config does not enable the log does not resume it.
    scene.node.stop()?;
    scene.until_logging(&[])?;
    scene.connect()?;
    scene.node.start()?;
    scene.node.kill9()?;
    scene.until_logging(&[program])?;
    configure_log(&scene.node, None)?;
    scene.node.start()?;
    scene.until_logging(&[])?;
    let before = kernel_lines(&scene.node).len();
    scene.connect()?;
    scene.node.stop()?;
    ensure_eq(
        "log lines without a log",
        kernel_lines(&scene.node).len(),
        before,
    )?;
    let left_alone = kernel_lines(&scene.node)
        .iter()
        .any(|line| line.contains("ignored"));
    ensure_eq("ignored at debug", left_alone, false)
}

#[test]
#[ignore = "independent of the kernel: `culvert-lab verify` loads each program, and all log in the same way"]
fn every_program_can_log_its_decisions() -> Result<()> {
    let scene = prepared()?;

    for row in PROGRAMS {
        let program = row.name;
        configure_log(&scene.node, Some((program, "trace")))?;
        scene.node.start().context(program)?;
        // The guard is loaded but not attached, since this node steers no connections.
        let logging = [program];
        let count = usize::from(*row != GUARD);
        scene.until_logging(&logging[..count])?;
        for dialer in Dialer::TCP {
            dialer
                .expect_served(&scene.client, WEB, HTTP, "backend")
                .context(program)?;
        }
        for dialer in Dialer::UDP {
            let socket = dialer.udp_socket(&scene.client)?;
            dialer
                .expect_answer(&socket, WEB, DNS, "backend")
                .context(program)?;
        }
        for (asked, dialer) in [("connect4", Dialer::V4), ("connect6", Dialer::V6)] {
            if program == asked {
                ensure!(dialer.connect(&scene.client, UNUSED, HTTP).is_err());
            }
        }
        scene.node.stop()?;
    }

    let [v4, v6] = [WEB.v4.to_string(), WEB.v6.to_string()];
    let expect_logged = |program: &str, start: &str, vip: &str| {
        let name = format!("program=\"{program}\"");
        until_logged(&scene.node, &[start, &format!("destination={vip} "), &name])
    };
    for (hook, start) in [
        ("connect", "translated"),
        ("sendmsg", "translated"),
        ("recvmsg", "restored"),
        ("getpeername", "restored"),
    ] {
        expect_logged(&format!("{hook}4"), start, &v4).context(hook)?;
        expect_logged(&format!("{hook}6"), start, &v6).context(hook)?;
    }
    for vip in [&v4, &v6] {
        expect_logged("sock_release", "closed", vip)?;
    }
    let ignored = "no frontend, ignored";
    expect_logged("connect4", ignored, &UNUSED.v4.to_string())?;
    expect_logged("connect6", ignored, &UNUSED.v6.to_string()).map(drop)
}

#[test]
fn the_guard_logs_dropped_packets() -> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;
    let node = testbed.node();
    configure_log(node, Some(("guard", "debug")))?;
    node.start()?;

    for to in ["198.19.0.1", "fd00:c01e::1"] {
        let to: IpAddr = to.parse()?;
        let socket = node
            .outside()
            .socket(Domain::for_address((to, 1).into()), Type::STREAM)?;
        let connected = connect_within(&socket, (to, 1).into(), Duration::from_millis(300));
        ensure!(connected.is_err(), "{to} is open");
        let words = [
            "dropped: ",
            &format!("destination={to} reason=guard_dropped "),
        ];
        until_logged(node, &words)?;
    }
    Ok(())
}

#[test]
fn a_flow_from_outside_and_each_of_its_packets_are_logged() -> Result<()> {
    let service = || Service::new("outside", WEB.ips()).port(Protocol::TCP, HTTP, HTTP_TARGET);
    let scene = Scene::new(&["backend"])?;
    let backend = scene.backend("backend")?.v4();
    let node = &scene.node;
    node.apply(service().node_port(NODE_HTTP).backend(backend))?;
    node.apply(
        Service::new("empty", EMPTY.ips())
            .port(Protocol::TCP, HTTP, HTTP_TARGET)
            .node_port(NODE_HTTP + 1),
    )?;
    let client = format!("{OUTSIDE_V4} ");
    let dialled = |port| format!("destination={} port={port} protocol=TCP", HOST.v4);
    node.start()?;
    for program in ["in", "out"] {
        configure_log(node, Some((program, "trace")))?;
        node.restart()?;
        scene.until_logging(&[program])?;
        Dialer::V4.expect_served(node.outside(), HOST, NODE_HTTP, "backend")?;
        let backend = format!("{backend} ");
        if program == "in" {
            let (dialled, client) = (dialled(NODE_HTTP), format!("client={client}"));
            let chosen = format!("backend={backend}backend_port={HTTP_TARGET} reason=translated");
            until_logged(
                node,
                &["DEBUG kernel: flow begun", &client, &dialled, &chosen],
            )?;
            let new = format!("new={backend}new_port={HTTP_TARGET}");
            until_logged(
                node,
                &["TRACE kernel: replaced", &dialled, &new, "program=\"in\""],
            )?;
            ensure!(
                Dialer::V4
                    .connect(node.outside(), HOST, NODE_HTTP + 1)
                    .is_err()
            );
            let refused = format!("port={} protocol=TCP", NODE_HTTP + 1);
            until_logged(node, &["refused", &refused, "reason=no_backend"])?;
        } else {
            let (from, to) = (format!("source={backend}"), format!("destination={client}"));
            let new = format!("new={} new_port={NODE_HTTP}", HOST.v4);
            until_logged(node, &["TRACE kernel: replaced", &from, &to, &new])?;
        }
    }
    Ok(())
}

#[test]
fn lost_events_of_a_flood_are_counted_and_nothing_is_delayed() -> Result<()> {
    for (dialer, program) in [(Dialer::V4, "sendmsg4"), (Dialer::V6, "sendmsg6")] {
        flood(dialer, program).context(program)?;
    }
    Ok(())
}

fn flood(dialer: Dialer, program: &str) -> Result<()> {
    let scene = prepared()?;
    configure_log(&scene.node, Some((program, "debug")))?;
    scene.node.start()?;
    let socket = dialer.udp_socket(&scene.client)?;
    let flood = || -> Result<()> {
        for _ in 0..1000 {
            socket.send_to(b"who?", dialer.address(WEB, DNS))?;
        }
        Ok(())
    };

    let lost = || scene.node.reason_count("log_events_lost");
    wait::until(CHANGE_TIMEOUT, || {
        flood().is_ok() && lost().is_ok_and(|lost| lost > 0)
    })?;
    until_logged(&scene.node, &["WARN kernel: too many events"])?;
    ensure!(scene.node.is_ready());
    scene.connect()?;

    // After the daemon is killed, its programs keep writing events, but nothing reads them.
    scene.node.kill9()?;
    flood()?;
    scene.connect()?;
    scene.node.start()?;
    let before = lost()?;
    scene.connect()?;
    until_logged(&scene.node, &["translated", program])?;
    scene.node.kill9()?;
    flood()?;
    configure_log(&scene.node, None)?;
    scene.node.start()?;
    let lost = lost()?;
    ensure!(lost > before, "lost {lost}, before {before}");
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: programs are replaced as in `restart`"]
fn no_connect_fails_while_the_log_is_switched_on_and_off() -> Result<()> {
    let scene = prepared()?;
    scene.node.start()?;

    scene.under_load(&[(WEB, &["backend"])], 4, |number| {
        let program = ["connect4", "connect6"][number / 2 % 2];
        let log = number.is_multiple_of(2).then_some((program, "debug"));
        configure_log(&scene.node, log)?;
        if number % 4 < 2 {
            scene.node.stop()?;
        } else {
            scene.node.kill9()?;
        }
        let before = kernel_lines(&scene.node).len();
        scene.node.start()?;
        // While the log is enabled, connections made by the load produce new lines.
        log.map_or(Ok(()), |_| {
            wait::until(CHANGE_TIMEOUT, || kernel_lines(&scene.node).len() > before)
        })
    })
}
