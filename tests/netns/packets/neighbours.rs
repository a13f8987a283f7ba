//! The programs beside what else may be on a node: rules of a CNI plugin, programs of others on the same link, another uplink for
//! the replies, and pods with an address of their own on the uplink's network.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr},
    path::Path,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    feature::{self, Feature},
    sandbox::Process,
    test_name,
};

use super::{
    ADDRESSES, Backend, CLIENT, ENABLED, REMOTE, expect_reached, netfilter::load_rules, remote,
    route_to_node, service, start_with_remote_backend,
};
use crate::{
    fixture::Scene,
    service_addresses::{self, configured},
    support::{CHANGE_TIMEOUT, Dialer, HOST, HTTP, Vip, ensure_eq, run},
};

/// A rule like that of flannel and Calico, which masquerades what is not from a pod on the way to one.
const MASQUERADE: &str = "table inet cni {
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept
    ip saddr != 203.0.113.0/24 ip daddr 203.0.113.0/24 counter masquerade fully-random
    ip6 saddr != 2001:db8:113::/48 ip6 daddr 2001:db8:113::/48 counter masquerade fully-random
  }
}
";

/// Rules that forward only what begins a connection to a pod, and what belongs to one.
const STATEFUL: &str = "table inet stateful {
  chain forward {
    type filter hook forward priority 0; policy drop
    ct state established,related accept
    ct state new ip daddr 203.0.113.0/24 accept
    ct state new ip6 daddr 2001:db8:113::/48 accept
  }
}
";

/// Asserts that a client outside reaches the backend on another node at every address but the cluster IP.
fn expect_masqueraded(scene: &Scene, backend: &Backend, what: &str) -> Result<()> {
    for (address, vip, ports) in ADDRESSES.into_iter().skip(1) {
        expect_reached(scene.node.outside(), backend, (vip, ports), HOST.ips())
            .with_context(|| format!("{what}: {address}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: `reachability` shows what the programs leave to the stack"]
fn flows_pass_a_masquerade_rule_and_a_stateful_policy_for_forwarded_packets() -> Result<()> {
    for (name, rules) in [("masquerade", MASQUERADE), ("stateful", STATEFUL)] {
        let scene = configured(ENABLED)?;
        let (_remote, backend) = start_with_remote_backend(&scene)?;
        load_rules(&scene, &format!("{name}.nft"), rules)?;
        expect_masqueraded(&scene, &backend, name)?;
    }
    Ok(())
}

/// Creates a node whose route to the client outside leads by a second uplink. The client's packets come by the first one.
fn with_second_uplink() -> Result<Scene> {
    let scene = configured("uplinks: [uplink, second]")?;
    let (host, outside) = (scene.node.host(), scene.node.outside());
    let pid = outside.pid();
    host.ip(&format!(
        "link add second type veth peer name eth1 netns {pid}\n\
         link set second up\n\
         addr add 198.51.100.1/24 dev second\n\
         addr add 2001:db8:51::1/64 dev second nodad\n"
    ))?;
    outside.ip("link set eth1 up\n\
         addr add 198.51.100.2/24 dev eth1\n\
         addr add 2001:db8:51::2/64 dev eth1 nodad\n")?;
    let Vip { v4, v6 } = CLIENT;
    host.ip(&format!(
        "route add {v4}/32 via 198.51.100.2\nroute add {v6}/128 via 2001:db8:51::2\n"
    ))?;
    Ok(scene)
}

#[test]
#[ignore = "independent of the kernel: the entries of a flow contain no link"]
fn replies_may_leave_by_another_uplink_than_the_requests_have_come_by() -> Result<()> {
    let scene = with_second_uplink()?;
    route_to_node(&scene)?;
    let pod = scene.node.pod("local")?;
    let ips = [pod.v4(), pod.v6()];
    let backend = Backend::at(&pod, ips)?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(ips))?;
    for (address, vip, ports) in ADDRESSES {
        let client = (scene.node.outside(), CLIENT.ips());
        expect_reached(client.0, &backend, (vip, ports), client.1).context(address)?;
    }

    let scene = with_second_uplink()?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    expect_masqueraded(&scene, &backend, "a backend on another node")
}

#[test]
fn flows_pass_programs_of_others_before_and_behind() -> Result<()> {
    for kind in [&["uplink"][..], &["--filter", "uplink"]] {
        let scene = configured(ENABLED)?;
        let directory = scene.node.network().lab().directory().to_owned();
        let attach = |name: &str| -> Result<Process> {
            let arguments = [&["attach-empty"], kind].concat();
            let command = scene.node.host().lab_command(&arguments)?;
            command.start_until("attached", &Path::join(&directory, name), CHANGE_TIMEOUT)
        };
        let _before = attach("before.log")?;
        let (_remote, backend) = start_with_remote_backend(&scene)?;
        expect_masqueraded(&scene, &backend, "a program before")?;
        let _behind = attach("behind.log")?;
        expect_masqueraded(&scene, &backend, "another one behind")?;
    }
    Ok(())
}

#[test]
fn packets_to_a_macvlan_pod_are_left_alone() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Macvlan])? {
        return Ok(());
    }
    const POD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 50);
    let scene = configured(ENABLED)?;
    let remote = remote(&scene)?;
    let _backend = Backend::at(&remote, REMOTE.ips())?;
    let pod = scene.node.network().create_unconnected("macvlan")?;
    let (host, pid) = (scene.node.host(), pod.pid());
    run(
        host,
        &format!("ip link add eth0 link uplink netns {pid} type macvlan mode bridge"),
    )?;
    pod.ip(&format!(
        "link set lo up\nlink set eth0 up\naddr add {POD}/24 dev eth0\n"
    ))?;
    scene.node.start()?;
    // The Service also has the pod's own address, which the node must not take.
    let external = service_addresses::service().spec(&format!("externalIPs: [{POD}]"));
    scene.program(external.backends(REMOTE.ips()))?;
    let own = pod.listen((POD, HTTP))?;
    let client = scene.node.outside();
    let mut stream = Dialer::V4.connect(client, Vip { v4: POD, ..HOST }, HTTP)?;
    let (mut accepted, from) = own.accept()?;
    ensure_eq("the client", from.ip(), IpAddr::V4(CLIENT.v4))?;
    accepted.write_all(b"pod")?;
    let mut received = [0; 3];
    stream.read_exact(&mut received)?;
    ensure_eq("the server", &received, b"pod")?;
    Ok(())
}
