//! Tests sandboxes: their namespaces, their cgroups, and the sockets and processes in them.

use std::{
    fmt::Debug,
    fs,
    io::ErrorKind,
    net::{IpAddr, ToSocketAddrs},
    time::Duration,
};

use anyhow::Result;
use nix::sys::signal::{SigSet, Signal};
use tunnel_tests::{
    node_network::{HOST_V4, HOST_V6, NodeNetwork, OUTSIDE_V4, OUTSIDE_V6},
    sandbox::{RESPONSE_TIMEOUT, Sandbox},
    wait,
};

const TIME_LIMIT: Duration = Duration::from_secs(20);

#[test]
fn a_socket_created_by_an_executor_is_in_the_network_of_its_sandbox() -> Result<()> {
    let network = NodeNetwork::new()?;
    let pod = network.pod("pod")?;

    let listener = pod.listen(pod.addr_v4(80))?;
    let stream = network.host().connect(pod.addr_v4(80))?;
    let (_, from) = listener.accept()?;

    assert_eq!(stream.peer_addr()?, pod.addr_v4(80));
    assert_eq!(from.ip(), HOST_V4);
    Ok(())
}

#[test]
fn every_sandbox_reaches_every_other_over_both_families() -> Result<()> {
    let network = NodeNetwork::new()?;
    let (one, two) = (network.pod("one")?, network.pod("two")?);
    let server = two.serve_http(80)?;

    for sandbox in [&**one, network.host(), network.outside()] {
        sandbox.connect(two.addr_v4(80))?;
        sandbox.connect(two.addr_v6(80))?;
    }
    let others: [(IpAddr, _); 4] = [
        (HOST_V4.into(), network.host()),
        (HOST_V6.into(), network.host()),
        (OUTSIDE_V4.into(), network.outside()),
        (OUTSIDE_V6.into(), network.outside()),
    ];
    for (address, sandbox) in others {
        let _listener = sandbox.listen((address, 81))?;
        one.connect((address, 81))?;
    }

    // connect() may return before the server's thread has accepted the connection.
    let counted = || server.record().map_or(0, |record| record.total().accepted);
    wait::until(TIME_LIMIT, || counted() >= 6)?;
    assert_eq!(counted(), 6);
    Ok(())
}

#[test]
fn sandboxes_have_separate_cgroups_even_if_they_share_a_network() -> Result<()> {
    let network = NodeNetwork::new()?;
    let pod = network.pod("pod")?;
    let neighbour = network.share_namespace(&pod, "elsewhere/pod", None)?;

    for (sandbox, group) in [
        (&**pod, "/instance/pods/pod"),
        (network.host(), "/instance/host"),
        (network.outside(), "/outside"),
        (&neighbour, "/elsewhere/pod"),
    ] {
        let groups = sandbox.run(&["cat", "/proc/self/cgroup"])?;
        let own = groups.lines().find(|line| line.starts_with("0::"));
        assert!(own.is_some_and(|it| it.ends_with(group)), "{groups}");
    }
    let _listener = pod.listen("127.0.0.1:80")?;
    neighbour.connect("127.0.0.1:80")?;
    Ok(())
}

#[test]
fn a_service_address_fails_at_once_where_nothing_translates_it() -> Result<()> {
    let network = NodeNetwork::new()?;
    let pod = network.pod("pod")?;

    for sandbox in [&**pod, network.host(), network.outside()] {
        expect_no_route(sandbox, "10.96.0.10:80");
        expect_no_route(sandbox, "[fd00:10:96::a]:80");
    }
    Ok(())
}

/// Asserts that connect() fails at once because there is no route.
pub(crate) fn expect_no_route(sandbox: &Sandbox, to: impl ToSocketAddrs + Copy + Debug) {
    let error = sandbox.connect(to).expect_err("nobody has this address");
    let expected = [ErrorKind::HostUnreachable, ErrorKind::NetworkUnreachable];
    assert!(expected.contains(&error.kind()), "{error:?} from {to:?}");
}

#[test]
fn the_host_has_a_bpf_file_system_that_only_its_own_processes_see() -> Result<()> {
    let network = NodeNetwork::new()?;
    let directory = network.lab().directory().join("bpffs");
    let directory = directory.to_str().expect("UTF-8");
    let stat = ["stat", "--file-system", "--format=%T", directory];

    let inside = network.host().run(&stat)?;
    let seen = network.pod("pod")?.run(&stat)?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;

    assert_eq!(inside.trim(), "bpf_fs");
    assert_ne!(seen.trim(), "bpf_fs");
    assert!(!mounts.contains(directory));
    Ok(())
}

#[test]
fn the_error_of_a_failed_command_contains_its_output() -> Result<()> {
    let network = NodeNetwork::new()?;

    for (command, words) in [
        (
            &["sh", "-c", "echo reason >&2; exit 3"][..],
            &["reason", "code: Some(3)"][..],
        ),
        (&["/does/not/exist"], &["/does/not/exist"]),
    ] {
        let error = network.host().run(command).expect_err("it fails");
        let error = error.to_string();
        assert!(words.iter().all(|it| error.contains(*it)), "{error}");
    }
    Ok(())
}

#[test]
fn a_process_starts_with_no_signal_blocked() -> Result<()> {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGUSR1);
    blocked.thread_block()?;
    let network = NodeNetwork::new()?;

    let status = network.host().run(&["cat", "/proc/self/status"])?;

    assert!(status.contains("SigBlk:\t0000000000000000\n"), "{status}");
    Ok(())
}

#[test]
fn a_process_that_outlives_its_handle_is_killed() -> Result<()> {
    let network = NodeNetwork::new()?;

    let sleeper = network.host().command(&["sleep", "1000"]).start()?;
    let path = format!("/proc/{}", sleeper.pid());
    assert!(fs::exists(&path)?);
    drop(sleeper);

    assert!(!fs::exists(&path)?);
    let quick = network.host().command(&["true"]).start()?;
    assert!(quick.wait(RESPONSE_TIMEOUT)?.is_success());
    Ok(())
}
