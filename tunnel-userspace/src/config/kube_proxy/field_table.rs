//! Tables of all fields in kube-proxy's config: those that are converted, and those that have no effect, with
//! their defaults (fields: `k8s.io/kube-proxy/config/v1alpha1/types.go`; defaults:
//! `pkg/proxy/apis/config/v1alpha1/defaults.go`).

use serde_json::Value;

use super::value_formats::is_default;

/// A field that has no effect: its path, the values that stand for its default, and the reason why it has no
/// effect.
type UnusedField = (&'static str, &'static [&'static str], &'static str);

const AT_ONCE: &str =
    "changes are written at once, and the maps are checked every service.fullSyncInterval";
const NO_RESYNC: &str = "known objects are not processed again periodically";
const NO_PACKET_MARK: &str = "no packet is marked";
const NO_IPVS: &str = "IPVS is not used";
const JSON: &str = "requests ask for JSON";
const NO_RATE_LIMIT: &str = "there is one list and one watch for each kind, without a rate limit";
const LOGGING: &str = "--log and --log-format configure the log";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const BIND_RETRIED: &str = "binding a port in use is retried until the port is free";
const SET_ELSEWHERE: &str = "the service manager or the kubelet sets it";
const WINDOWS: &str = "Windows only";

/// The fields that are converted.
const CONVERTED: &[&str] = &[
    "apiVersion",
    "kind",
    "clientConnection.kubeconfig",
    "hostnameOverride",
    "bindAddress",
    "healthzBindAddress",
    "metricsBindAddress",
    "mode",
    "iptables.localhostNodePorts",
    "ipvs.scheduler",
    "nodePortAddresses",
    "detectLocalMode",
    "detectLocal.bridgeInterface",
    "detectLocal.interfaceNamePrefix",
    "clusterCIDR",
    "iptables.masqueradeAll",
    "iptables.snatNodeInternalIP",
    "nftables.masqueradeAll",
    "conntrack.maxPerCore",
    "conntrack.min",
    "conntrack.tcpEstablishedTimeout",
    "conntrack.tcpCloseWaitTimeout",
    "conntrack.tcpBeLiberal",
    "conntrack.udpTimeout",
    "conntrack.udpStreamTimeout",
];

/// Fields that have no effect, and whose zero value (`""`, 0, false, `[]`, `0s`) also stands for the default.
const UNUSED: &[UnusedField] = &[
    ("featureGates", &[], "there are no feature gates"),
    ("clientConnection.acceptContentTypes", &[], JSON),
    ("clientConnection.contentType", &[PROTOBUF], JSON),
    ("clientConnection.qps", &["5", "5.0"], NO_RATE_LIMIT),
    ("clientConnection.burst", &["10"], NO_RATE_LIMIT),
    ("logging.format", &["text"], LOGGING),
    ("logging.flushFrequency", &["5s", "5000000000"], LOGGING),
    ("logging.verbosity", &[], LOGGING),
    ("logging.vmodule", &[], LOGGING),
    ("logging.options.json.infoBufferSize", &["0"], LOGGING),
    ("logging.options.json.splitStream", &[], LOGGING),
    ("logging.options.text.infoBufferSize", &["0"], LOGGING),
    ("logging.options.text.splitStream", &[], LOGGING),
    ("bindAddressHardFail", &[], BIND_RETRIED),
    ("enableProfiling", &[], "there is no /debug/pprof"),
    ("showHiddenMetricsForVersion", &[], "no metric is hidden"),
    ("iptables.syncPeriod", &["30s"], AT_ONCE),
    ("iptables.minSyncPeriod", &["1s"], AT_ONCE),
    ("ipvs.syncPeriod", &["30s"], AT_ONCE),
    ("ipvs.minSyncPeriod", &[], AT_ONCE),
    ("ipvs.excludeCIDRs", &[], NO_IPVS),
    ("ipvs.strictARP", &[], NO_IPVS),
    ("ipvs.tcpTimeout", &[], NO_IPVS),
    ("ipvs.tcpFinTimeout", &[], NO_IPVS),
    ("ipvs.udpTimeout", &[], NO_IPVS),
    ("nftables.syncPeriod", &["30s"], AT_ONCE),
    ("nftables.minSyncPeriod", &["1s"], AT_ONCE),
    ("winkernel.networkName", &[], WINDOWS),
    ("winkernel.sourceVip", &[], WINDOWS),
    ("winkernel.enableDSR", &[], WINDOWS),
    ("winkernel.rootHnsEndpointName", &[], WINDOWS),
    ("winkernel.forwardHealthCheckVip", &[], WINDOWS),
    ("configSyncPeriod", &["15m"], NO_RESYNC),
    ("portRange", &[], "kube-proxy does not use it either"),
    ("windowsRunAsService", &[], WINDOWS),
];

/// Fields that have no effect, and whose zero value does not stand for the default.
const UNUSED_NONZERO_DEFAULT: &[UnusedField] = &[
    ("iptables.masqueradeBit", &["14"], NO_PACKET_MARK),
    ("nftables.masqueradeBit", &["14"], NO_PACKET_MARK),
    ("oomScoreAdj", &["-999"], SET_ELSEWHERE),
];

/// Returns the paths of all known fields.
pub(super) fn paths() -> impl Iterator<Item = &'static str> {
    let unused = UNUSED.iter().chain(UNUSED_NONZERO_DEFAULT);
    let unused = unused.map(|(path, ..)| *path);
    CONVERTED.iter().copied().chain(unused)
}

/// Returns the reason why a field has no effect, or `None` if the field is converted or has its default.
pub(super) fn reason_unused(path: &str, value: &Value) -> Option<&'static str> {
    if CONVERTED.contains(&path) {
        return None;
    }
    for (fields, has_zero) in [(UNUSED, true), (UNUSED_NONZERO_DEFAULT, false)] {
        if let Some((_, defaults, why)) = fields.iter().find(|(known, ..)| *known == path) {
            return (!is_default(value, defaults, has_zero)).then_some(*why);
        }
    }
    Some("not a field of KubeProxyConfiguration; check the spelling")
}
