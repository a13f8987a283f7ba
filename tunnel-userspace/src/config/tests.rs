use serde_json::Value;

use super::*;
use crate::{
    source::{file, kube},
    tunnel::agent,
};

mod default_file;

/// The `identity` section, which every gateway and agent needs.
const IDENTITY: &str = "identity: { files: { ca: a, cert: b, key: c } }";

/// Splits a table into rows of two columns, separated by `=>`.
pub(super) fn rows(table: &str) -> impl Iterator<Item = (&str, &str)> {
    table.lines().skip(1).map(|row| {
        let (one, other) = row.split_once("=>").expect("two columns");
        (one.trim(), other.trim())
    })
}

fn refusal(text: &str) -> (String, String) {
    Config::parse(text).expect_err("refused")
}

/// Asserts that each config in the first column is refused. The second column contains the expected field in
/// the error and, optionally, after a colon, the beginning of the expected reason.
fn assert_refused<'a>(table: impl Iterator<Item = (&'a str, &'a str)>) {
    for (text, wanted) in table {
        let (wanted, start) = wanted.split_once(": ").unwrap_or((wanted, ""));
        let (field, reason) = refusal(text);
        assert_eq!(field, wanted, "{text}");
        assert!(reason.starts_with(start), "{text}: {reason}");
    }
}

#[test]
fn the_effective_config_includes_the_defaults_of_absent_fields() {
    let config = Config::parse("service: { algorithm: round-robin }").expect("good");

    let shown = config.effective();

    let shown = &shown["culvert.dev"];
    assert_eq!(shown["service"]["algorithm"], "round-robin");
    assert_eq!(shown["service"]["fullSyncInterval"], "3600s");
    assert_eq!(shown["healthz"]["address"], "0.0.0.0:10256");
    let read: Config = serde_json::from_value(shown.clone()).expect("a config");
    assert_eq!(read, config);
}

/// Collects the paths of all sections, as JSON pointers.
fn sections(value: &Value, path: &str, found: &mut Vec<String>) {
    if let Some(fields) = value.as_object() {
        found.push(path.to_owned());
        for (name, value) in fields {
            sections(value, &format!("{path}/{name}"), found);
        }
    }
}

#[test]
fn every_section_refuses_an_unknown_field() {
    let complete = section_mappings::with_all_sections();
    let mut paths = Vec::new();
    sections(&complete, "", &mut paths);
    assert!(paths.len() > 15, "{paths:?}");

    for path in paths {
        let mut config = complete.clone();
        config.pointer_mut(&path).expect("a section")["nosuch"] = 1.into();
        let (field, reason) = refusal(&config.to_string());
        let expected = format!("{path}/nosuch").replace('/', ".");
        assert_eq!(field, expected.trim_start_matches('.'), "{reason}");
        assert!(reason.contains("unknown field `nosuch`"), "{reason}");
    }
}

#[test]
fn an_unknown_field_is_refused_with_the_nearest_known_one() {
    let table = "
        nodename: a => nodeName
        source: { kube: { maxBackof: 1s } } => maxBackoff
        bpf: { maps: { frontend: 1 } } => frontends
        tunnel: { steering: { prefix: [] } } => prefixes
        tunnel: { gateway: { handshakes: 1 } } => maxPendingHandshakes
        tunnel: { agent: { dials: 1 } } => maxPendingDials
        tunnel: { session: { streams: 1 } } => maxStreams
        tunnel: { session: { window: 1 } } => streamWindowBytes";
    for (text, field) in rows(table) {
        let (_, reason) = refusal(text);
        assert!(
            reason.ends_with(&format!("; did you mean `{field}`?")),
            "{reason}"
        );
    }
    let (_, reason) = refusal("something: else");
    assert!(!reason.contains("did you mean"), "{reason}");
}

#[test]
fn an_invalid_value_is_refused_with_its_field() {
    let table = "
        bpf: { maps: { frontends: 0 } } => bpf.maps.frontends
        bpf: { maps: { frontends: many } } => bpf.maps.frontends
        admin: { address: localhost } => admin.address
        mode: userspace => mode
        mode: iptables => mode
        service: { fullSyncInterval: 0s } => service.fullSyncInterval
        sockets: { terminate: [sctp] } => sockets.terminate[0]
        sockets: { terminate: [udp, udp] } => sockets.terminate[1]
        service: { clusterCIDRs: [10.0.0.0/33] } => service.clusterCIDRs[0]
        service: { nodePortAddresses: [eth0] } => service.nodePortAddresses[0]
        service: { podLinks: [cni0, '*'] } => service.podLinks[1]: `*` is not the name of an interface
        service: { podLinks: ['l*c'] } => service.podLinks[0]: `l*c` is not the name of an interface
        service: { podLinks: ['eth*'], uplinks: [eth0] } => service.podLinks[0]: `eth*` matches an interface
        service: { packets: { deliveryUplinks: [eth0, 'e*0'] } } => service.packets.deliveryUplinks[1]: `e*0` is not
        service: { packets: { deliveryUplinks: [] } } => service.packets.deliveryUplinks: must have at least one entry
        tunnel: { gateway: {}, identity: { files: { ca: a, cert: b, key: c } }, steering: { allow: [] } } => \
            tunnel.steering.allow: must have at least one entry
        tunnel: { gateway: {}, identity: { files: { ca: a, cert: b, key: c } }, steering: { allow: [host, ns] } } => \
            tunnel.steering.allow[1]: `ns` is not host, a CIDR
        tunnel: { gateway: {}, identity: { files: { ca: a, cert: b, key: c } }, steering: { forwarded: [10.0.0.1/8] } } => \
            tunnel.steering.forwarded[0]: `10.0.0.1/8` must be a CIDR without bits set
        { service: { packets: { enabled: false } }, tunnel: { gateway: {}, identity: { files: { ca: a, cert: b, key: c } }, \
            steering: { forwarded: [10.0.0.0/8] } } } => tunnel.steering.forwarded: needs service.packets.enabled
        stateDir: '' => stateDir
        bpf: { bpffs: '' } => bpf.bpffs
        service: { localListeners: [0, 4294967295] } => service.localListeners[1]: 4294967295 is not the id of a user
        source: { file: { replacementDelay: 301s } } => source.file.replacementDelay: must be from 0s to 300s
        service: { localListenerPollInterval: 999ms } => service.localListenerPollInterval: must be from 1s to 60s
        service: { localListenerPollInterval: 60001ms } => service.localListenerPollInterval: must be from 1s to 60s
        source: { kube: { apiServers: ['https://a:1', 'b:1'] } } => \
            source.kube.apiServers[1]: `b:1` is not an API server address of the form https://HOST:PORT";
    assert_refused(rows(table));
}

#[test]
fn the_program_and_level_of_log_kernel_must_exist() {
    let (field, reason) = refusal("log: { kernel: { program: connect5 } }");
    assert_eq!(field, "log.kernel.program");
    for word in ["`connect5`", "connect4", "sock_release", "guard"] {
        assert!(reason.contains(word), "no {word} in {reason}");
    }
    let (field, reason) = refusal("log: { kernel: { program: connect4, level: loud } }");
    assert_eq!(field, "log.kernel.level");
    for word in ["`loud`", "error", "warn", "info", "debug", "trace"] {
        assert!(reason.contains(word), "no {word} in {reason}");
    }
    assert_eq!(refusal("log: { kernel: { level: debug } }").0, "log.kernel");
    assert_eq!(
        refusal("log: { kernel: { programs: x } }").0,
        "log.kernel.programs"
    );
}

#[test]
fn log_kernel_extends_the_log_filter_unless_the_filter_sets_the_target_itself() {
    let log = |text: &str| Config::parse(text).expect("good").log;

    assert_eq!(log("").filter("info"), "info");
    let guard = log("log: { kernel: { program: guard } }");
    assert_eq!(guard.filter("info"), "kernel=debug,info");
    let trace = log("log: { kernel: { program: connect4, level: trace } }");
    assert_eq!(
        trace.filter("warn,kernel=debug"),
        "kernel=trace,warn,kernel=debug"
    );
}

#[test]
fn absent_and_empty_node_port_addresses_differ() {
    let service = |text: &str| Config::parse(text).expect("good").service;

    assert_eq!(service("").node_port_addresses, None);
    let empty = service("service: { nodePortAddresses: [] }");
    assert_eq!(empty.node_port_addresses, Some(Vec::new()));
}

#[test]
fn relative_paths_are_relative_to_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("culvert.yaml");
    let text = "source: { file: { path: ./manifests } }\n\
                stateDir: state\n\
                bpf: { cgroup: /sys/fs/cgroup/x, bpffs: ../pins }\n\
                tunnel: { gateway: { denyFile: deny }, identity: { files: { ca: a, cert: b, key: c } } }\n";
    fs::write(&file, text).expect("written");

    let config = Config::read(&file).expect("good");

    assert_eq!(
        config.source.file().expect("a source").path,
        directory.path().join("./manifests")
    );
    assert_eq!(
        config.admin_socket(),
        directory.path().join("state/admin.sock")
    );
    assert_eq!(config.bpf.bpffs, directory.path().join("../pins"));
    assert_eq!(config.bpf.cgroup.0, Some("/sys/fs/cgroup/x".into()));
    let gateway = config.tunnel.gateway.expect("a gateway");
    assert_eq!(gateway.deny_file, Some(directory.path().join("deny")));
}

#[test]
fn an_invalid_tunnel_section_is_refused_with_its_field() {
    let with = |section: &str| refusal(&format!("tunnel: {{ {IDENTITY}, {section} }}"));

    let table = "
        steering: {} => tunnel.gateway
        steering: { onIngressDown: pass } => tunnel.steering.onIngressDown
        steering: { prefixes: [] } => tunnel.steering.prefixes
        steering: { prefixes: [10.0.0.0/33] } => tunnel.steering.prefixes[0]
        steering: { prefixes: [0.0.0.0/0] } => tunnel.steering.prefixes[0]
        steering: { prefixes: [127.0.0.0/8] } => tunnel.steering.prefixes[0]
        steering: { prefixes: ['ff00::/16'] } => tunnel.steering.prefixes[0]
        steering: { prefixes: ['::/64'] } => tunnel.steering.prefixes[0]
        steering: { prefixes: [10.0.0.1/16] } => tunnel.steering.prefixes[0]
        steering: { prefixes: [10.0.0.0/16, 10.1.0.0/16] } => tunnel.steering.prefixes[1]
        steering: { nodeCIDRs: [] } => tunnel.steering.nodeCIDRs
        steering: { nodeCIDRs: [10.0.0.0/16, 10.1.0.1/16] } => tunnel.steering.nodeCIDRs[1]
        steering: { edgeNodeSelector: a b } => tunnel.steering.edgeNodeSelector
        steering: { edgeNodeSelector: '' } => tunnel.steering.edgeNodeSelector
        socketMark: 0 => tunnel.socketMark
        steering: { configMap: x } => tunnel.steering.configMap
        agent: {} => tunnel.agent.gateways
        agent: { gateways: ['gw'] } => tunnel.agent.gateways[0]
        agent: { gateways: ['gw:1'], allowedTargets: ['self'] } => tunnel.agent.allowedTargets[0]
        agent: { gateways: ['gw:1'], connectionsPerGateway: 5 } => tunnel.agent.connectionsPerGateway
        session: { streamWindowBytes: 1 } => tunnel.session.streamWindowBytes
        session: { maxStreams: 4096 } => tunnel.session.streamWindowBytes
        session: { idleTimeout: 999ms } => tunnel.session.idleTimeout
        session: { idleTimeout: 169h } => tunnel.session.idleTimeout
        gateway: { missingNodeTimeout: 61m } => tunnel.gateway.missingNodeTimeout";
    for (section, field) in rows(table) {
        assert_eq!(with(section).0, field, "{section}");
    }
    assert_eq!(refusal("tunnel: { gateway: {} }").0, "tunnel.identity");
}

#[test]
fn manifest_files_are_the_default_source_only_if_no_source_is_configured() {
    let file = |text: &str| Config::parse(text).expect("good").source.file();

    assert_eq!(file(""), Some(file::FileSettings::default()));
    assert_eq!(file("source: { kube: {} }"), None);
    assert!(file("source: { kube: {}, file: { path: x } }").is_some());
}

#[test]
fn the_default_ports_of_the_tunnel_are_not_used_by_other_components() {
    // Ports of the kubelet, kube-proxy, the control plane and cloud controllers, yurthub, yurt-tunnel,
    // yurt-manager and Raven. The gateway deliberately uses 10262, yurt-tunnel's port for agents.
    let others = (10_248..=10_261)
        .chain(10_263..=10_269)
        .chain(10_271..=10_275)
        .chain([10_280]);
    let others: Vec<u16> = others.collect();
    let ours = [
        SteeringConfig::default().ingress_port,
        GatewaySettings::default().listen.port(),
        agent::AgentSettings::default().admin_address.port(),
    ];

    assert!(ours.iter().all(|port| !others.contains(port)), "{ours:?}");
}

#[test]
fn a_section_that_is_a_list_or_a_single_value_is_refused() {
    let table = "
        [] => top level: LIST
        - bpf: {} => top level: LIST
        bpf => top level: VALUE
        service: [] => service: LIST
        bpf: { maps: [1, 2] } => bpf.maps: LIST
        source: { kube: [] } => source.kube: LIST
        log: [] => log: LIST
        tunnel: { gateway: [] } => tunnel.gateway: LIST
        bpf: auto => bpf: VALUE";
    let reason = |kind: &str| format!("must be a mapping, but is {kind}; valid fields are");
    let table = table.replace("LIST", &reason("a list"));
    assert_refused(rows(&table.replace("VALUE", &reason("a single value"))));
    assert!(
        refusal("bpf: []")
            .1
            .ends_with("bpffs, cgroup, checkInterval, maps, testConnectionInterval")
    );
}

#[test]
fn a_node_name_must_be_valid_in_kubernetes() {
    for name in ["Foo_Bar!", "Edge", "-a", "a..b", "a b"] {
        let (field, reason) = refusal(&format!("nodeName: '{name}'"));
        assert_eq!(field, "nodeName");
        let start = format!("`{name}` is not a valid Node name; use lower-case letters");
        assert!(reason.starts_with(&start), "{reason}");
    }
    let name = |length: usize| Config::parse(&format!("nodeName: {}", "a".repeat(length)));
    assert!(name(253).is_ok() && name(254).is_err());
    let edge = Config::parse("nodeName: edge-1.site.example").expect("good");
    assert_eq!(edge.node_name, "edge-1.site.example");
}

#[test]
fn two_listeners_with_the_same_port_are_refused() {
    let table = "
        admin: { address: 127.0.0.1:10256 } => \
            healthz.address: its default port 10256 is already used by admin.address (
        { admin: { address: '[::]:9' }, healthz: { address: 127.0.0.1:9 } } => \
            healthz.address: port 9 is already used by admin.address (
        tunnel: { gateway: { listen: '0.0.0.0:10270' }, steering: {}, IDENTITY } => \
            tunnel.steering.ingressPort: its default port 10270 is already used by tunnel.gateway.listen (";
    assert_refused(rows(&table.replace("IDENTITY", IDENTITY)));
    for text in [
        "{ admin: { address: 127.0.0.1:9 }, healthz: { address: 192.0.2.1:9 } }",
        "{ admin: { address: 127.0.0.1:0 }, healthz: { address: 127.0.0.1:0 } }",
    ] {
        assert!(Config::parse(text).is_ok(), "{text}");
    }
}
