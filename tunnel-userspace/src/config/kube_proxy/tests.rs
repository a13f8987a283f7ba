use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use super::*;
use crate::{
    config::{
        Config, ConfigError, DetectLocal, FlowTimeouts, INVALID_NODE_NAME, MasqueradeAddress,
        parse_yaml, tests::rows,
    },
    model::{Algorithm, NodeAddresses},
};

/// The kube-proxy config file that kubeadm writes for a dual-stack cluster.
const KUBEADM: &str = include_str!("kubeadm.yaml");

const FILE_TYPE: &str =
    "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// Returns the text of a kube-proxy config file with the given comma-separated fields.
fn with(fields: &str) -> String {
    let head = FILE_TYPE.trim().replace('\n', ", ");
    format!("{{ {head}, {fields} }}")
}

fn file(text: &str) -> Value {
    parse_yaml(text).expect("YAML")
}

fn conversion(fields: &str) -> Conversion {
    convert(&file(&with(fields)), Path::new("/etc/proxy")).expect("good")
}

/// Returns the Culvert config to which a kube-proxy config file with the given fields is converted.
fn converted_config(fields: &str) -> Config {
    Config::from_value(conversion(fields).config).expect("good")
}

fn warned_fields(fields: &str) -> Vec<String> {
    let warnings = conversion(fields).warnings.into_iter();
    warnings.map(|warning| warning.field).collect()
}

fn refusal(text: &str) -> FieldError {
    convert(&file(text), Path::new("/")).expect_err("refused")
}

#[test]
fn the_file_of_kubeadm_is_converted_without_a_warning() {
    let meaning = convert(&file(KUBEADM), Path::new("/")).expect("good");
    let config = Config::from_value(meaning.config).expect("good");

    assert_eq!(meaning.warnings, []);
    let plain = Config::parse(
        "source: { kube: { kubeconfig: /var/lib/kube-proxy/kubeconfig.conf } }\n\
         service: { clusterCIDRs: [10.244.0.0/16, 'fd00:10:244::/56'], nodeAddresses: serve }",
    );
    assert_eq!(config, plain.expect("good"));
}

#[test]
fn every_field_in_the_file_of_kubeadm_is_known() {
    let mut found = Vec::new();
    let file = file(KUBEADM);
    collect_fields(&file, "", &mut found);
    let found: BTreeSet<_> = found.iter().map(|(path, _)| path.as_str()).collect();
    let known: BTreeSet<_> = paths().collect();

    let stray: Vec<_> = found.difference(&known).collect();
    assert!(stray.is_empty(), "{stray:?}");
    // Known fields that kubeadm's file lacks: they are newer, or kubeadm does not set them.
    let missing: Vec<_> = known.difference(&found).copied().collect();
    assert_eq!(
        missing,
        [
            "featureGates",
            "iptables.snatNodeInternalIP",
            "logging.format",
            "logging.options.json.splitStream",
            "logging.options.text.splitStream",
            "logging.vmodule",
            "windowsRunAsService",
        ]
    );
}

#[test]
fn each_field_with_an_equivalent_is_converted() {
    let table = "
         =>
        hostnameOverride: ' Edge-1' => nodeName: edge-1
        clientConnection: { kubeconfig: kube.conf } => source: { kube: { kubeconfig: /etc/proxy/kube.conf } }
        bindAddress: 0.0.0.0 =>
        bindAddress: '::' => { healthz: { address: '[::]:10256' }, admin: { address: '[::1]:10249' } }
        healthzBindAddress: 127.0.0.1 => healthz: { address: '127.0.0.1:10256' }
        healthzBindAddress: 127.0.0.1:99 => healthz: { address: '127.0.0.1:99' }
        healthzBindAddress: '[::1]:99' => healthz: { address: '[::1]:99' }
        healthzBindAddress: '::1' => healthz: { address: '[::1]:10256' }
        metricsBindAddress: 127.0.0.1 => admin: { address: '127.0.0.1:10249' }
        metricsBindAddress: '[::1]:99' => admin: { address: '[::1]:99' }
        nodePortAddresses: [] =>
        nodePortAddresses: [primary, 'fd00::/8'] => service: { nodePortAddresses: [primary, 'fd00::/8'] }
        iptables: { localhostNodePorts: false } => service: { nodePortAddresses: [primary] }
        iptables: { localhostNodePorts: true } =>
        mode: iptables =>
        mode: nftables =>
        mode: '' =>
        mode: ipvs => service: { algorithm: round-robin }
        mode: ipvs, ipvs: { scheduler: rr } => service: { algorithm: round-robin }
        mode: ipvs, ipvs: { scheduler: sh } => service: { algorithm: source-hash }
        mode: ipvs, ipvs: { scheduler: wlc } => service: { algorithm: least-conn }";
    for (fields, ours) in rows(table) {
        // The API server is a source, and the node's addresses are served, even if the row does not list this.
        let mut ours = Config::parse(ours).expect("good");
        ours.service.node_addresses = NodeAddresses::Serve;
        let mut found = converted_config(fields);
        assert_eq!(warned_fields(fields), Vec::<String>::new(), "{fields}");
        if ours.source.kube.is_none() {
            assert_eq!(found.source.kube.take(), Some(Default::default()));
        }
        assert_eq!(found, ours, "{fields}");
    }
}

#[test]
fn fields_for_packets_are_converted() {
    let fields = "detectLocalMode: NodeCIDR, clusterCIDR: 10.0.0.0/8, \
                  mode: nftables, nftables: { masqueradeAll: true }";
    let service = converted_config(fields).service;

    assert_eq!(service.detect_local, DetectLocal::NodeCidr);
    assert_eq!(service.cluster_cidrs, ["10.0.0.0/8"]);
    assert!(service.masquerade_all);
    assert_eq!(warned_fields(fields), Vec::<String>::new());
    // Only the section for the selected mode applies.
    let masquerades = |fields: &str| converted_config(fields).service.masquerade_all;
    assert!(!masquerades("nftables: { masqueradeAll: true }"));
    assert!(masquerades("iptables: { masqueradeAll: true }"));

    let fields = "detectLocalMode: BridgeInterface, \
                  detectLocal: { bridgeInterface: cni0, interfaceNamePrefix: lxc }, \
                  iptables: { snatNodeInternalIP: true }";
    let service = converted_config(fields).service;
    assert_eq!(service.detect_local, DetectLocal::BridgeInterface);
    assert_eq!(service.bridge_interface, "cni0");
    assert_eq!(service.interface_name_prefix, "lxc");
    assert_eq!(service.packets.address, MasqueradeAddress::Node);
}

#[test]
fn the_limit_and_timeouts_of_conntrack_become_those_of_flows() {
    let fields = "conntrack: { tcpEstablishedTimeout: 2h0m0s, tcpCloseWaitTimeout: 30m, \
                  udpTimeout: 0s, udpStreamTimeout: 5m }";
    let timeouts = converted_config(fields).service.packets.timeouts;
    let wanted = FlowTimeouts {
        tcp_established: Duration::from_secs(7200),
        tcp_half_closed: Duration::from_secs(1800),
        udp_answered: Duration::from_secs(300),
        ..FlowTimeouts::default()
    };
    assert_eq!(timeouts, wanted);

    let kernel =
        converted_config(&fields.replace('}', ", tcpBeLiberal: true, min: 300000 }")).conntrack;
    let settings: Vec<_> = kernel.settings().collect();
    let wanted = [
        ("nf_conntrack_max", 300_000),
        ("nf_conntrack_tcp_be_liberal", 1),
        ("nf_conntrack_tcp_timeout_established", 7200),
        ("nf_conntrack_tcp_timeout_close_wait", 1800),
        ("nf_conntrack_udp_timeout_stream", 300),
    ];
    assert_eq!(settings, wanted);

    let flows = |fields: &str| converted_config(fields).bpf.maps.flows;
    let default = Config::default().bpf.maps.flows;
    assert_eq!(flows("conntrack: { maxPerCore: 1, min: 200000 }"), 200_000);
    assert_eq!(flows("conntrack: { maxPerCore: 4294967295 }"), 1 << 24);
    for fields in [
        "conntrack: {}",
        "conntrack: { maxPerCore: 0, min: 7 }",
        "mode: ipvs",
    ] {
        assert_eq!(flows(fields), default, "{fields}");
    }
}

#[test]
fn each_field_without_effect_gets_one_warning_unless_it_has_its_default() {
    let table = "
        featureGates: { Some: true } => featureGates
        featureGates: {} =>
        clientConnection: { qps: 5, burst: 10 } =>
        clientConnection: { qps: 50 } => clientConnection.qps
        clientConnection: { burst: 100 } => clientConnection.burst
        clientConnection: { contentType: application/vnd.kubernetes.protobuf } =>
        clientConnection: { contentType: application/json } => clientConnection.contentType
        logging: { verbosity: 4 } => logging.verbosity
        logging: { flushFrequency: 5s, format: text } =>
        logging: { flushFrequency: 5000000000 } =>
        logging: { format: json } => logging.format
        logging: null =>
        bindAddress: 192.0.2.1 => bindAddress
        bindAddressHardFail: true => bindAddressHardFail
        enableProfiling: true => enableProfiling
        mode: kernelspace => mode
        iptables: { masqueradeBit: 14, syncPeriod: 30s } =>
        iptables: { masqueradeBit: 0 } => iptables.masqueradeBit
        iptables: { syncPeriod: 1m } => iptables.syncPeriod
        iptables: { syncPeriod: 0h0m30s, minSyncPeriod: 1000ms } =>
        ipvs: { strictARP: true } => ipvs.strictARP
        ipvs: { excludeCIDRs: [10.0.0.0/8] } => ipvs.excludeCIDRs
        ipvs: { scheduler: rr } => ipvs.scheduler
        mode: ipvs, ipvs: { scheduler: lblc } => ipvs.scheduler
        mode: nftables, iptables: { localhostNodePorts: false } => iptables.localhostNodePorts
        nodePortAddresses: [all], iptables: { localhostNodePorts: false } => iptables.localhostNodePorts
        winkernel: { enableDSR: true } => winkernel.enableDSR
        oomScoreAdj: -999 =>
        oomScoreAdj: 0 => oomScoreAdj
        conntrack: { tcpBeLiberal: true } =>
        configSyncPeriod: 15m0s =>
        configSyncPeriod: 1m => configSyncPeriod
        portRange: 1-2 => portRange
        windowsRunAsService: true => windowsRunAsService
        udpIdleTimeout: 250ms => udpIdleTimeout
        iptables: { masqueradeBits: 1 } => iptables.masqueradeBits";
    for (fields, wanted) in rows(table) {
        assert_eq!(warned_fields(fields).join(" "), wanted, "{fields}");
    }
}

#[test]
fn a_scheduler_without_an_equivalent_leaves_the_default() {
    let fields = "mode: ipvs, ipvs: { scheduler: lblc }";

    assert_eq!(
        converted_config(fields).service.algorithm,
        Algorithm::Random
    );
    let warning = conversion(fields).warnings.pop().expect("one").to_string();
    assert!(warning.contains("`lblc` has no equivalent"), "{warning}");
}

#[test]
fn another_kind_or_version_and_invalid_values_are_refused_with_their_field() {
    let table = "
        => apiVersion: must be GROUP/v1alpha1, but is absent
        apiVersion: GROUP/v1alpha2 => apiVersion: must be GROUP/v1alpha1, but is GROUP/v1alpha2
        { apiVersion: GROUP/v1alpha1, kind: Kubelet } => \
            kind: must be KubeProxyConfiguration, but is Kubelet";
    for (text, wanted) in rows(&table.replace("GROUP", GROUP)) {
        let (field, reason) = refusal(text);
        assert_eq!(format!("{field}: {reason}"), wanted);
    }
    // If Culvert's config refuses a converted value, the error names kube-proxy's field.
    let table = "
        mode: userspace => mode
        mode: 1 => mode
        bindAddress: eth0 => bindAddress
        healthzBindAddress: localhost:1 => healthzBindAddress
        metricsBindAddress: 'x' => metricsBindAddress
        nodePortAddresses: [primary, eth0] => nodePortAddresses[1]
        nodePortAddresses: [1] => nodePortAddresses[0]
        nodePortAddresses: all => nodePortAddresses
        iptables: { localhostNodePorts: 1 } => iptables.localhostNodePorts
        detectLocalMode: Guess => detectLocalMode
        clusterCIDR: '10.0.0.0/8,x' => clusterCIDR
        conntrack: { udpTimeout: 5 } => conntrack.udpTimeout
        conntrack: { udpTimeout: 5d } => conntrack.udpTimeout
        conntrack: { udpTimeout: -5s } => conntrack.udpTimeout
        conntrack: { tcpEstablishedTimeout: 1ms } => conntrack.tcpEstablishedTimeout
        conntrack: { min: -1 } => conntrack.min
        hostnameOverride: 7 => hostnameOverride
        clientConnection: { kubeconfig: [] } => clientConnection.kubeconfig";
    for (fields, field) in rows(table) {
        assert_eq!(refusal(&with(fields)).0, field, "{fields}");
    }
    let table = "
        hostnameOverride: 'Foo_Bar!' => hostnameOverride: `foo_bar!` NO_NAME
        metricsBindAddress: 0.0.0.0:10256 => \
            healthzBindAddress: its default port 10256 is already used by admin.address (0.0.0.0:10256)";
    for (fields, wanted) in rows(&table.replace("NO_NAME", INVALID_NODE_NAME)) {
        let (field, reason) = refusal(&with(fields));
        assert_eq!(format!("{field}: {reason}"), wanted);
    }
}

/// Creates a temporary directory that contains the given files, and returns it with the files' paths.
fn directory(files: &[(&str, &str)]) -> (tempfile::TempDir, Vec<PathBuf>) {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |(name, text): &(&str, &str)| {
        let path = directory.path().join(name);
        fs::write(&path, text).expect("written");
        path
    };
    let paths = files.iter().map(write).collect();
    (directory, paths)
}

#[test]
fn fields_of_our_own_file_override_those_of_kube_proxy() {
    let own = "nodeName: own\nservice: { algorithm: random }\nsource: { kube: null, file: null }\n";
    let theirs = format!(
        "{FILE_TYPE}hostnameOverride: theirs\nmode: ipvs\nclusterCIDR: 10.0.0.0/8\n\
         healthzBindAddress: 127.0.0.1\nipvs: {{ strictARP: true }}\n"
    );
    let (_directory, paths) = directory(&[("own.yaml", own), ("theirs.yaml", &theirs)]);

    let (config, warnings) =
        Config::read_with_kube_proxy(&paths[0], Path::new("/nowhere"), &paths[1]).expect("good");

    assert_eq!(config.node_name, "own");
    assert_eq!(config.service.algorithm, Algorithm::Random);
    assert_eq!(config.service.cluster_cidrs, ["10.0.0.0/8"]);
    assert_eq!(config.healthz.address.to_string(), "127.0.0.1:10256");
    assert_eq!(config.source.kube, None);
    assert!(config.source.file.is_some());
    assert_eq!(warnings.len(), 1);
}

#[test]
fn our_own_file_may_be_absent_at_its_default_path_only() {
    let (directory, paths) =
        directory(&[("theirs.yaml", &format!("{FILE_TYPE}hostnameOverride: a"))]);
    let absent = directory.path().join("absent.yaml");

    let (config, _) = Config::read_with_kube_proxy(&absent, &absent, &paths[0]).expect("good");
    assert_eq!(config.node_name, "a");

    let error = Config::read_with_kube_proxy(&absent, Path::new("/elsewhere"), &paths[0]);
    assert!(matches!(error, Err(ConfigError::Read { path, .. }) if path == absent));
}

#[test]
fn errors_name_the_invalid_file_and_its_field() {
    let (_directory, paths) = directory(&[
        ("own.yaml", "bpf: { bpfs: x }"),
        ("theirs.yaml", FILE_TYPE),
        ("wrong.yaml", "apiVersion: kubeproxy.config.k8s.io/v1\n"),
        ("good.yaml", "nodeName: a"),
    ]);
    for (own, theirs, wanted) in [
        (0, 1, "own.yaml: bpf.bpfs"),
        (3, 2, "wrong.yaml: apiVersion: must be"),
    ] {
        let read = Config::read_with_kube_proxy(&paths[own], Path::new("/nowhere"), &paths[theirs]);
        let error = read.expect_err("refused").to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn check_file_distinguishes_our_own_file_from_that_of_kube_proxy() {
    let older = "apiVersion: kubeproxy.config.k8s.io/v1alpha0\n";
    let (_directory, paths) = directory(&[
        ("kubeadm.yaml", KUBEADM),
        ("own.yaml", "nodeName: a"),
        ("older.yaml", older),
        ("bad.yaml", "kind: Service"),
    ]);
    let check = |at: usize| Config::check_file(&paths[at]).map_err(|error| error.to_string());

    assert_eq!(check(0).expect("good"), []);
    assert_eq!(check(1).expect("good"), []);
    let older = check(2).expect_err("refused");
    assert!(older.contains("older.yaml: apiVersion"), "{older}");
    let bad = check(3).expect_err("refused");
    assert!(bad.contains("bad.yaml: kind: unknown field"), "{bad}");
}

#[test]
fn the_page_on_configuration_has_a_row_for_every_known_field_and_no_other() {
    let page = include_str!("../../../../docs/configuration.md");
    let (_, table) = page.split_once("| field of kube-proxy |").expect("a table");
    let rows = table.lines().map_while(|line| {
        let is_row = line.is_empty() || line.starts_with('|') || !line.contains("##");
        is_row.then_some(line)
    });
    let cells = rows.filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    let names = cells.flat_map(|cell| cell.split("`, `"));
    let named: BTreeSet<_> = names.map(|name| name.trim_matches(['`', ' '])).collect();
    let known: BTreeSet<_> = paths().collect();

    let stray: Vec<_> = named.symmetric_difference(&known).collect();
    assert!(stray.is_empty(), "{stray:?}");
}
