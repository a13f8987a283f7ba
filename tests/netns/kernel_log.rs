//! The event log of a kernel program, which is written only while the config enables it.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aya::{maps::MapInfo, programs::loaded_programs};
use socket2::{Domain, Type};
use tunnel_common::table::{REASON_COUNTS, GUARD, PROGRAMS};
use tunnel_tests::{instance::Settings, node::Node, place::connect_within, site::Site, wait};

use crate::{
    scene::{EMPTY, Scene, WEB, configure},
    support::{CHANGE, DNS, HTTP, HTTP_TARGET, Vip, Way, maps_folder, same, until_same},
};

/// An address without a Service.
const OTHER: Vip = Vip::of(99);

/// The ring buffer for log events; only a program with event logs has it.
const RING: &str = "AYA_LOGS";

/// Enables the log of this program at this level, or disables the log, from the next start on.
fn ask_for(node: &Node, program: Option<(&str, &str)>) -> Result<()> {
    let log = program
        .map(|(program, level)| format!("{{ kernel: {{ program: {program}, level: {level} }} }}"));
    configure(node, "log", log.as_deref().unwrap_or("{}"))
}

/// Returns the lines of the daemon's log that come from kernel programs.
fn told(node: &Node) -> Vec<String> {
    let logs = node.logs();
    let lines = logs.lines().filter(|line| line.contains(" kernel: "));
    lines.map(str::to_owned).collect()
}

/// Waits for a line of a kernel program with all of these words, and returns it.
fn until_told(node: &Node, words: &[&str]) -> Result<String> {
    let line = |lines: Vec<String>| {
        let mut lines = lines.into_iter();
        lines.find(|line| words.iter().all(|word| line.contains(word)))
    };
    wait::some(CHANGE, || line(told(node)))
        .with_context(|| format!("no line with {words:?} in {:#?}", told(node)))
}

/// Creates a node with a Service and a Service without a backend, without starting the daemon.
fn prepared() -> Result<Scene> {
    let scene = Scene::leading_to(&["backend"], &["backend"])?;
    scene.node.apply(EMPTY.service("empty"))?;
    Ok(scene)
}

impl Scene {
    fn connect(&self) -> Result<()> {
        for way in [Way::V4, Way::V6] {
            way.is_served(&self.client, WEB, HTTP, "backend")?;
        }
        Ok(())
    }

    /// Returns the names of loaded programs that have event logs and use this node's maps. The kernel
    /// unloads a program a moment after its last link is gone.
    fn telling(&self) -> Result<Vec<String>> {
        let count =
            MapInfo::from_pin(self.node.bpffs().join(maps_folder("")).join(REASON_COUNTS.name))?.id();
        let mut telling = Vec::new();
        for program in loaded_programs().filter_map(Result::ok) {
            // Other tests load and unload programs concurrently.
            let Ok(Some(maps)) = program.map_ids() else {
                continue;
            };
            let is_ring =
                |id: &u32| MapInfo::from_id(*id).is_ok_and(|map| map.name_as_str() == Some(RING));
            if maps.contains(&count) && maps.iter().any(is_ring) {
                telling.extend(program.name_as_str().map(str::to_owned));
            }
        }
        Ok(telling)
    }

    fn until_telling(&self, expected: &[&str]) -> Result<()> {
        until_same("telling", expected, || self.telling())
    }
}

#[test]
fn a_connect_is_told_with_its_destination_and_backend_while_it_is_asked_for() -> Result<()> {
    tell_connects(Way::V4, "connect4")
}

#[test]
#[ignore = "no kernel decides it: told as over IPv4"]
fn a_connect_over_ipv6_is_told_with_its_destination_and_backend_while_it_is_asked_for() -> Result<()>
{
    tell_connects(Way::V6, "connect6")
}

fn tell_connects(way: Way, program: &str) -> Result<()> {
    let scene = prepared()?;
    scene.node.start()?;
    scene.connect()?;
    same("telling by default", scene.telling()?, [""; 0])?;
    same("status", scene.node.status()?["kernelLog"].is_null(), true)?;

    ask_for(&scene.node, Some((program, "debug")))?;
    scene.node.restart()?;
    same("told by default", told(&scene.node), [""; 0])?;
    scene.until_telling(&[program])?;
    scene.connect()?;
    let web = way.to(WEB, HTTP).ip();
    let destination = format!("destination={web} port={HTTP} protocol=TCP");
    let backend = format!(
        "backend={} backend_port={HTTP_TARGET} reason=translated",
        scene.backend("backend")?.address(way.family())
    );
    let line = until_told(
        &scene.node,
        &["DEBUG kernel: translated", &destination, &backend],
    )?;
    ensure!(line.contains(program), "{line}");
    ensure!(way.connect(&scene.client, EMPTY, HTTP).is_err());
    let empty = format!("destination={} ", way.to(EMPTY, HTTP).ip());
    until_told(&scene.node, &["refused", &empty, "reason=no_backend"])?;
    // Connects that are not for a Service are logged only at level trace.
    ensure!(way.connect(&scene.client, OTHER, HTTP).is_err());
    let status = scene.node.culvert(&["status"])?.stdout;
    ensure!(status.contains(&format!("{program}, debug")), "{status}");

    // Stopping the daemon ends the log; a daemon whose config has no log does not resume it.
    scene.node.stop()?;
    scene.until_telling(&[])?;
    scene.connect()?;
    scene.node.start()?;
    scene.node.kill9()?;
    scene.until_telling(&[program])?;
    ask_for(&scene.node, None)?;
    scene.node.start()?;
    scene.until_telling(&[])?;
    let before = told(&scene.node).len();
    scene.connect()?;
    scene.node.stop()?;
    same("told after all", told(&scene.node).len(), before)?;
    let left_alone = told(&scene.node)
        .iter()
        .any(|line| line.contains("ignored"));
    same("ignored at debug", left_alone, false)
}

#[test]
#[ignore = "no kernel decides it: each is loaded by `verify`, and all tell in the same way"]
fn every_program_can_tell_what_it_does() -> Result<()> {
    let scene = prepared()?;

    for program in PROGRAMS.iter().map(|program| program.name) {
        ask_for(&scene.node, Some((program, "trace")))?;
        scene.node.start().context(program)?;
        // The guard is loaded, but not attached to an uplink, since this node does not steer.
        let telling = [program];
        let count = usize::from(program != GUARD.name);
        scene.until_telling(&telling[..count])?;
        for way in Way::TCP {
            way.is_served(&scene.client, WEB, HTTP, "backend")
                .context(program)?;
        }
        for way in Way::UDP {
            let socket = way.udp(&scene.client)?;
            way.is_answered(&socket, WEB, DNS, "backend")
                .context(program)?;
        }
        for (asked, way) in [("connect4", Way::V4), ("connect6", Way::V6)] {
            if program == asked {
                ensure!(way.connect(&scene.client, OTHER, HTTP).is_err());
            }
        }
        scene.node.stop()?;
    }

    let [v4, v6] = [WEB.v4.to_string(), WEB.v6.to_string()];
    let told = |program: &str, start: &str, vip: &str| {
        let name = format!("program=\"{program}\"");
        until_told(&scene.node, &[start, &format!("destination={vip} "), &name])
    };
    for (hook, start) in [
        ("connect", "translated"),
        ("sendmsg", "translated"),
        ("recvmsg", "restored"),
        ("getpeername", "restored"),
    ] {
        told(&format!("{hook}4"), start, &v4).context(hook)?;
        told(&format!("{hook}6"), start, &v6).context(hook)?;
    }
    for vip in [&v4, &v6] {
        told("sock_release", "closed", vip)?;
    }
    let nobody = "no frontend, ignored";
    told("connect4", nobody, &OTHER.v4.to_string())?;
    told("connect6", nobody, &OTHER.v6.to_string()).map(drop)
}

#[test]
fn the_guard_tells_what_it_drops() -> Result<()> {
    let site = Site::set(Settings::from_environment()?)?;
    let node = site.node();
    ask_for(node, Some(("guard", "debug")))?;
    node.start()?;

    for to in ["198.19.0.1", "fd00:c01e::1"] {
        let to: IpAddr = to.parse()?;
        let socket = node
            .outside()
            .socket(Domain::for_address((to, 1).into()), Type::STREAM)?;
        let knocked = connect_within(&socket, (to, 1).into(), Duration::from_millis(300));
        ensure!(knocked.is_err(), "{to} is open");
        let words = [
            "dropped: ",
            &format!("destination={to} reason=guard_dropped "),
        ];
        until_told(node, &words)?;
    }
    Ok(())
}

#[test]
fn a_flood_of_events_waits_is_lost_by_number_and_holds_up_nobody() -> Result<()> {
    for (way, program) in [(Way::V4, "sendmsg4"), (Way::V6, "sendmsg6")] {
        flood(way, program).context(program)?;
    }
    Ok(())
}

fn flood(way: Way, program: &str) -> Result<()> {
    let scene = prepared()?;
    ask_for(&scene.node, Some((program, "debug")))?;
    scene.node.start()?;
    let socket = way.udp(&scene.client)?;
    let flood = || -> Result<()> {
        for _ in 0..1000 {
            socket.send_to(b"who?", way.to(WEB, DNS))?;
        }
        Ok(())
    };

    let lost = || scene.node.reason("log_events_lost");
    wait::until(CHANGE, || {
        flood().is_ok() && lost().is_ok_and(|lost| lost > 0)
    })?;
    until_told(&scene.node, &["WARN kernel: more events than can be told"])?;
    ensure!(scene.node.is_ready());
    scene.connect()?;

    // After a kill, the daemon's programs still write events, but nothing reads them.
    scene.node.kill9()?;
    flood()?;
    scene.connect()?;
    scene.node.start()?;
    let before = lost()?;
    scene.connect()?;
    until_told(&scene.node, &["translated", program])?;
    scene.node.kill9()?;
    flood()?;
    ask_for(&scene.node, None)?;
    scene.node.start()?;
    let lost = lost()?;
    ensure!(lost > before, "lost {lost}, before {before}");
    Ok(())
}

#[test]
#[ignore = "no kernel decides it: programs are replaced as in `restart`"]
fn no_connect_fails_while_the_log_is_switched_on_and_off() -> Result<()> {
    let scene = prepared()?;
    scene.node.start()?;

    scene.under_load(&[(WEB, &["backend"])], 4, |number| {
        let program = ["connect4", "connect6"][number / 2 % 2];
        let log = number.is_multiple_of(2).then_some((program, "debug"));
        ask_for(&scene.node, log)?;
        if number % 4 < 2 {
            scene.node.stop()?;
        } else {
            scene.node.kill9()?;
        }
        let before = told(&scene.node).len();
        scene.node.start()?;
        // While the log is enabled, the connects of the load cause new lines.
        log.map_or(Ok(()), |_| {
            wait::until(CHANGE, || told(&scene.node).len() > before)
        })
    })
}
