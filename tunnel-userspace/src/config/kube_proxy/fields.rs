//! Every field of kube-proxy's config, with its default and what becomes of it
//! (`k8s.io/kube-proxy/config/v1alpha1/types.go`; defaults:
//! `pkg/proxy/apis/config/v1alpha1/defaults.go`).

/// A field.
#[derive(Clone, Copy, Debug)]
pub(in crate::config) struct Field {
    /// Its path.
    pub(in crate::config) path: &'static str,
    /// What it is where the file doesn't say, as the file would say it; what stands for the same.
    pub(super) defaults: &'static [&'static str],
    /// Whether its zero value (`""`, 0, false, `[]`, `0s`) stands for that too.
    pub(super) zero: bool,
    /// What becomes of it.
    pub(in crate::config) use_: Use,
}

/// What becomes of a field.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in crate::config) enum Use {
    /// It goes by this field of ours.
    Taken,
    /// It has no meaning here: why.
    None(&'static str),
}

const PACKETS: &str = "taken over, but only the packet path reads it, which is not built yet";
const AT_ONCE: &str = "changes are written at once, and the maps checked each service.fullSync";
const NO_RULES: &str = "no packet is marked";
const NO_IPVS: &str = "there is no IPVS here";
const NO_CONNTRACK: &str = "connection tracking of the kernel is left as it is";
const LINUX: &str = "it is for Windows";
const LOGGING: &str = "logs go by --log and --log-format";
const FEW: &str = "there is no limit: requests are a list and a watch for each kind";

const fn taken(path: &'static str, defaults: &'static [&'static str]) -> Field {
    Field {
        path,
        defaults,
        zero: true,
        use_: Use::Taken,
    }
}

const fn none(path: &'static str, defaults: &'static [&'static str], why: &'static str) -> Field {
    Field {
        path,
        defaults,
        zero: true,
        use_: Use::None(why),
    }
}

/// A field whose zero value is one of its own.
const fn exact(path: &'static str, defaults: &'static [&'static str], why: &'static str) -> Field {
    Field {
        path,
        defaults,
        zero: false,
        use_: Use::None(why),
    }
}

/// All of them.
pub(in crate::config) const FIELDS: &[Field] = &[
    taken("apiVersion", &[]),
    taken("kind", &[]),
    none("featureGates", &[], "there are no features to switch"),
    none(
        "clientConnection.acceptContentTypes",
        &[],
        "JSON is asked for",
    ),
    none(
        "clientConnection.contentType",
        &["application/vnd.kubernetes.protobuf"],
        "JSON is asked for",
    ),
    taken("clientConnection.kubeconfig", &[]),
    none("clientConnection.qps", &["5", "5.0"], FEW),
    none("clientConnection.burst", &["10"], FEW),
    none("logging.format", &["text"], LOGGING),
    none("logging.flushFrequency", &["5s", "5000000000"], LOGGING),
    none("logging.verbosity", &[], LOGGING),
    none("logging.vmodule", &[], LOGGING),
    none("logging.options.json.infoBufferSize", &["0"], LOGGING),
    none("logging.options.json.splitStream", &[], LOGGING),
    none("logging.options.text.infoBufferSize", &["0"], LOGGING),
    none("logging.options.text.splitStream", &[], LOGGING),
    taken("hostnameOverride", &[]),
    taken("bindAddress", &["0.0.0.0"]),
    taken("healthzBindAddress", &[]),
    taken("metricsBindAddress", &[]),
    none(
        "bindAddressHardFail",
        &[],
        "a port that is taken is tried again until it is free",
    ),
    none("enableProfiling", &[], "there is no /debug/pprof"),
    none("showHiddenMetricsForVersion", &[], "no metric is hidden"),
    taken("mode", &["iptables"]),
    exact("iptables.masqueradeBit", &["14"], NO_RULES),
    none("iptables.masqueradeAll", &[], PACKETS),
    Field {
        path: "iptables.localhostNodePorts",
        defaults: &["true"],
        zero: false,
        use_: Use::Taken,
    },
    none(
        "iptables.snatNodeInternalIP",
        &[],
        "sources are kept at sockets",
    ),
    none("iptables.syncPeriod", &["30s"], AT_ONCE),
    none("iptables.minSyncPeriod", &["1s"], AT_ONCE),
    none("ipvs.syncPeriod", &["30s"], AT_ONCE),
    none("ipvs.minSyncPeriod", &[], AT_ONCE),
    taken("ipvs.scheduler", &[]),
    none("ipvs.excludeCIDRs", &[], NO_IPVS),
    none("ipvs.strictARP", &[], NO_IPVS),
    none("ipvs.tcpTimeout", &[], NO_IPVS),
    none("ipvs.tcpFinTimeout", &[], NO_IPVS),
    none("ipvs.udpTimeout", &[], NO_IPVS),
    exact("nftables.masqueradeBit", &["14"], NO_RULES),
    none("nftables.masqueradeAll", &[], PACKETS),
    none("nftables.syncPeriod", &["30s"], AT_ONCE),
    none("nftables.minSyncPeriod", &["1s"], AT_ONCE),
    none("winkernel.networkName", &[], LINUX),
    none("winkernel.sourceVip", &[], LINUX),
    none("winkernel.enableDSR", &[], LINUX),
    none("winkernel.rootHnsEndpointName", &[], LINUX),
    none("winkernel.forwardHealthCheckVip", &[], LINUX),
    none("detectLocalMode", &["ClusterCIDR"], PACKETS),
    none(
        "detectLocal.bridgeInterface",
        &[],
        "only the packet path could tell, which is not built yet",
    ),
    none(
        "detectLocal.interfaceNamePrefix",
        &[],
        "only the packet path could tell, which is not built yet",
    ),
    none("clusterCIDR", &[], PACKETS),
    taken("nodePortAddresses", &[]),
    exact(
        "oomScoreAdj",
        &["-999"],
        "the service manager or the kubelet sets it",
    ),
    exact("conntrack.maxPerCore", &["32768"], NO_CONNTRACK),
    exact("conntrack.min", &["131072"], NO_CONNTRACK),
    exact("conntrack.tcpEstablishedTimeout", &["24h"], NO_CONNTRACK),
    exact("conntrack.tcpCloseWaitTimeout", &["1h"], NO_CONNTRACK),
    none("conntrack.tcpBeLiberal", &[], NO_CONNTRACK),
    none("conntrack.udpTimeout", &[], NO_CONNTRACK),
    none("conntrack.udpStreamTimeout", &[], NO_CONNTRACK),
    none(
        "configSyncPeriod",
        &["15m"],
        "what is known is not gone through again",
    ),
    none("portRange", &[], "kube-proxy does not use it either"),
    none("windowsRunAsService", &[], LINUX),
];
