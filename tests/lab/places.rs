//! Places: namespaces, cgroups and the sockets made in them.

use std::{fs, io::ErrorKind, net::IpAddr, time::Duration};

use anyhow::Result;
use nix::sys::signal::{SigSet, Signal};
use tunnel_tests::{
    place::ANSWER,
    topology::{HOST_V4, HOST_V6, OUTSIDE_V4, OUTSIDE_V6, Topology},
    wait,
};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn a_socket_made_by_an_agent_lives_in_the_network_of_its_place() -> Result<()> {
    let topology = Topology::new()?;
    let pod = topology.pod("pod")?;

    let listener = pod.listen(pod.at4(80))?;
    let stream = topology.host().connect(pod.at4(80))?;
    let (_, from) = listener.accept()?;

    assert_eq!(stream.peer_addr()?, pod.at4(80));
    assert_eq!(from.ip(), HOST_V4);
    Ok(())
}

#[test]
fn every_place_reaches_every_other_over_both_families() -> Result<()> {
    let topology = Topology::new()?;
    let (one, two) = (topology.pod("one")?, topology.pod("two")?);
    let server = two.serve_http(80)?;

    for place in [&**one, topology.host(), topology.outside()] {
        place.connect(two.at4(80))?;
        place.connect(two.at6(80))?;
    }
    let others: [(IpAddr, _); 4] = [
        (HOST_V4.into(), topology.host()),
        (HOST_V6.into(), topology.host()),
        (OUTSIDE_V4.into(), topology.outside()),
        (OUTSIDE_V6.into(), topology.outside()),
    ];
    for (address, place) in others {
        let _listener = place.listen((address, 81))?;
        one.connect((address, 81))?;
    }

    // A connect is back before the server's thread has accepted it.
    let counted = || server.record().map_or(0, |record| record.total().accepted);
    wait::until(SOON, || counted() >= 6)?;
    assert_eq!(counted(), 6);
    Ok(())
}

#[test]
fn processes_of_a_pod_are_in_its_cgroup_and_those_outside_are_not() -> Result<()> {
    let topology = Topology::new()?;
    let groups = |text: String| {
        text.lines()
            .find_map(|line| line.strip_prefix("0::").map(str::to_owned))
    };

    let pod = groups(topology.pod("pod")?.run(&["cat", "/proc/self/cgroup"])?);
    let host = groups(topology.host().run(&["cat", "/proc/self/cgroup"])?);
    let outside = groups(topology.outside().run(&["cat", "/proc/self/cgroup"])?);

    assert!(pod.is_some_and(|path| path.ends_with("/instance/pods/pod")));
    assert!(host.is_some_and(|path| path.ends_with("/instance/host")));
    assert!(outside.is_some_and(|path| path.ends_with("/outside")));
    Ok(())
}

#[test]
fn a_service_address_fails_at_once_where_nothing_translates_it() -> Result<()> {
    let topology = Topology::new()?;
    let pod = topology.pod("pod")?;

    for place in [&**pod, topology.host(), topology.outside()] {
        for address in ["10.96.0.10:80", "[fd00:10:96::a]:80"] {
            let error = place.connect(address).expect_err("nobody has this address");
            let kind = error.kind();
            let expected = [ErrorKind::HostUnreachable, ErrorKind::NetworkUnreachable];
            assert!(expected.contains(&kind), "{kind:?} from {address}");
        }
    }
    Ok(())
}

#[test]
fn the_host_has_a_bpf_file_system_that_only_its_own_processes_see() -> Result<()> {
    let topology = Topology::new()?;
    let folder = topology.lab().folder().join("bpffs");
    let folder = folder.to_str().expect("UTF-8");

    let inside = topology
        .host()
        .run(&["stat", "--file-system", "--format=%T", folder])?;
    let seen = topology
        .pod("pod")?
        .run(&["stat", "--file-system", "--format=%T", folder])?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;

    assert_eq!(inside.trim(), "bpf_fs");
    assert_ne!(seen.trim(), "bpf_fs");
    assert!(!mounts.contains(folder));
    Ok(())
}

#[test]
fn a_place_beside_another_shares_its_network_but_not_its_cgroup() -> Result<()> {
    let topology = Topology::new()?;
    let pod = topology.pod("pod")?;

    let beside = topology.beside(&pod, "elsewhere/pod", None)?;
    let _listener = pod.listen("127.0.0.1:80")?;

    beside.connect("127.0.0.1:80")?;
    assert!(
        beside
            .run(&["cat", "/proc/self/cgroup"])?
            .contains("/elsewhere/pod")
    );
    Ok(())
}

#[test]
fn a_command_that_fails_says_what_it_printed() -> Result<()> {
    let topology = Topology::new()?;

    let error = topology
        .host()
        .run(&["sh", "-c", "echo reason >&2; exit 3"])
        .expect_err("it returned 3");
    let missing = topology
        .host()
        .run(&["/does/not/exist"])
        .expect_err("there is no such program");

    assert!(error.to_string().contains("reason"));
    assert!(error.to_string().contains("code: Some(3)"));
    assert!(missing.to_string().contains("/does/not/exist"));
    Ok(())
}

#[test]
fn a_process_starts_with_no_signal_blocked() -> Result<()> {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGUSR1);
    blocked.thread_block()?;
    let topology = Topology::new()?;

    let status = topology.host().run(&["cat", "/proc/self/status"])?;

    assert!(status.contains("SigBlk:\t0000000000000000\n"), "{status}");
    Ok(())
}

#[test]
fn a_process_that_outlives_its_handle_is_killed() -> Result<()> {
    let topology = Topology::new()?;

    let sleeper = topology.host().command(&["sleep", "1000"]).start()?;
    let path = format!("/proc/{}", sleeper.pid());
    assert!(fs::exists(&path)?);
    drop(sleeper);

    assert!(!fs::exists(&path)?);
    let quick = topology.host().command(&["true"]).start()?;
    assert!(quick.wait(ANSWER)?.is_success());
    Ok(())
}
