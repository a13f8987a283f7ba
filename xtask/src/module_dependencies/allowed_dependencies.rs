//! The table of permitted dependencies.

/// The paths that a module may or must not use. The longest entry that is a prefix of a path decides. If
/// there is no such entry, another crate is permitted, but another module of the same crate is not.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// Module of `tunnel-userspace`. In the submodule `a::b`, a rule for `a::b` replaces the rule for `a`.
    pub(super) module: &'static str,
    pub(super) may: &'static [&'static str],
    pub(super) never: &'static [&'static str],
}

// Crates that only some modules may use.
const AYA: &str = "aya";
const K8S_OPENAPI: &str = "k8s_openapi";
const KUBE: &str = "kube";
/// Forbids the crates `aya`, `k8s_openapi` and `kube`.
const NO_KERNEL_OR_KUBERNETES: &[&str] = &[AYA, K8S_OPENAPI, KUBE];
/// Forbids the crates `aya`, `k8s_openapi`, `kube` and `tokio`.
const NO_TOKIO: &[&str] = &[AYA, K8S_OPENAPI, KUBE, "tokio"];

/// Forbids the crates in [`NO_TOKIO`], and also I/O, clocks, threads and random numbers.
const PURE: &[&str] = &[
    AYA,
    K8S_OPENAPI,
    KUBE,
    "tokio",
    "rand",
    "std::env",
    "std::fs",
    "std::io",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
];

const fn rule(
    module: &'static str,
    never: &'static [&'static str],
    may: &'static [&'static str],
) -> Rule {
    Rule { module, may, never }
}

/// The rules for the modules of `tunnel-userspace`.
pub(super) const USERSPACE: &[Rule] = &[
    rule(
        "main",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::app",
            "crate::cli",
            "crate::config",
            "crate::error_chain",
            "crate::telemetry",
        ],
    ),
    // `cli` uses the types that the client for the admin socket returns.
    rule(
        "cli",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::bpf::AttachmentView",
            "crate::admin",
            "crate::config",
            "crate::identity::ca",
            "crate::explain::ExplainedStep",
            "crate::explain::Explanation",
            "crate::explain::Kind",
            "crate::explain::Outcome",
            "crate::flows::FlowView",
            "crate::flows::FlowsView",
            "crate::net::NetworkView",
            "crate::net::PacketsView",
            "crate::round_robin",
            "crate::reconcile::EndpointView",
            "crate::reconcile::FrontendView",
            "crate::reconcile::PortView",
            "crate::reconcile::ServiceView",
            "crate::sockets::PodTerminator",
            "crate::sockets::TerminatorView",
            "crate::source::Problem",
            "crate::source::SourceReport",
            "crate::source::ServerStatus",
            "crate::tunnel::ClientView",
            "crate::tunnel::ConnectionView",
            "crate::tunnel::NodeView",
            "crate::tunnel::SessionView",
            "crate::tunnel::TrafficView",
        ],
    ),
    rule(
        "fuzz",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::bpf::search_btf",
            "crate::config::Config",
            "crate::identity::request",
            "crate::net::messages_in",
            "crate::source::file::cache_changes_nothing",
            "crate::tunnel::parse_messages",
        ],
    ),
    rule("app", &[], &["crate"]),
    // `config` uses the settings types in other modules, and types that parse fields.
    rule(
        "config",
        NO_TOKIO,
        &[
            "crate::bpf::KernelLog",
            "crate::bpf::KernelLogLevel",
            "crate::controller::ControllerSettings",
            "crate::duration",
            "crate::identity::IdentityFiles",
            "crate::identity::is_subdomain",
            "crate::model::Algorithm",
            "crate::model::ExternalIps",
            "crate::model::NodeAddresses",
            "crate::model::Selector",
            "crate::model::TopologyKeys",
            "crate::net::matches_link",
            "crate::plan::NodePortAddresses",
            "crate::serde_message",
            "crate::sockets",
            "crate::source::file",
            "crate::source::kube",
            "crate::tunnel::ENTRY_FORM",
            "crate::tunnel::SessionLimits",
            "crate::tunnel::is_client_entry",
            "crate::tunnel::is_namespace_entry",
            "crate::tunnel::agent",
            "crate::tunnel::gateway",
        ],
    ),
    rule("allocator", NO_TOKIO, &[]),
    rule("telemetry", NO_KERNEL_OR_KUBERNETES, &[]),
    rule("clock", NO_TOKIO, &[]),
    rule("capabilities", NO_TOKIO, &[]),
    rule("error_chain", NO_TOKIO, &[]),
    rule("duration", NO_TOKIO, &[]),
    rule("file_descriptors", NO_TOKIO, &[]),
    rule("serde_message", NO_TOKIO, &[]),
    rule("parallel", NO_TOKIO, &[]),
    rule("round_robin", PURE, &[]),
    rule("drain", NO_KERNEL_OR_KUBERNETES, &[]),
    rule("publish", NO_KERNEL_OR_KUBERNETES, &[]),
    rule("listen", NO_KERNEL_OR_KUBERNETES, &["crate::drain"]),
    rule("tasks", NO_KERNEL_OR_KUBERNETES, &[]),
    rule(
        "source",
        &[AYA, KUBE, "tunnel_common::service"],
        &[
            "crate::k8s",
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::duration",
            "crate::publish",
            "crate::error_chain",
            "crate::parallel",
            "crate::tasks",
        ],
    ),
    rule(
        "source::kube",
        &[AYA, "tunnel_common::service"],
        &[
            "crate::k8s",
            "crate::model",
            "crate::source",
            "crate::events::EventSettings",
            "crate::clock",
            "crate::drain",
            "crate::duration",
            "crate::publish",
            "crate::error_chain",
            "crate::tasks",
        ],
    ),
    rule(
        "k8s",
        &[AYA, KUBE, "tokio"],
        &["crate::model", "crate::serde_message"],
    ),
    rule(
        "model",
        &[AYA, K8S_OPENAPI, KUBE, "tokio", "tunnel_common"],
        &["tunnel_common::addr", "tunnel_common::reason"],
    ),
    rule("plan", PURE, &["crate::model"]),
    rule(
        "reconcile",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::model",
            "crate::plan",
            "crate::clock",
            "crate::drain",
            "crate::publish",
            "crate::parallel",
            "crate::round_robin",
            "crate::tasks",
        ],
    ),
    rule(
        "reconcile::desired_plans",
        PURE,
        &["crate::model", "crate::plan", "crate::parallel"],
    ),
    rule(
        "reconcile::map_sync::diff",
        PURE,
        &["crate::model", "crate::plan"],
    ),
    rule(
        "flows",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::model",
            "crate::reconcile::PortNames",
            "crate::reconcile::ReadError",
            "crate::reconcile::WriteError",
            "crate::clock",
            "crate::drain",
            "crate::error_chain",
            "crate::publish",
        ],
    ),
    // `flows`, `reconcile` and `sockets` declare traits that `bpf` implements.
    rule(
        "bpf",
        &[K8S_OPENAPI, KUBE],
        &[
            "crate::flows",
            "crate::net",
            "crate::reconcile",
            "crate::sockets",
            "crate::capabilities",
            "crate::clock",
            "crate::error_chain",
        ],
    ),
    rule(
        "explain",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::bpf",
            "crate::net",
            "crate::reconcile::PortNames",
            "crate::reconcile::PublishedServices",
            "crate::error_chain",
        ],
    ),
    rule(
        "net",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::publish",
            "crate::error_chain",
            "crate::tasks",
        ],
    ),
    rule(
        "sockets",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::net",
            "crate::capabilities",
            "crate::drain",
            "crate::error_chain",
            "crate::listen",
        ],
    ),
    rule(
        "identity",
        NO_KERNEL_OR_KUBERNETES,
        &["crate::clock", "crate::drain", "crate::tasks"],
    ),
    rule(
        "identity::requester",
        &[AYA],
        &[
            "crate::identity",
            "crate::drain",
            "crate::error_chain",
            "crate::tasks",
        ],
    ),
    rule(
        "controller",
        &[AYA],
        &[
            "crate::identity",
            "crate::events",
            "crate::drain",
            "crate::duration",
            "crate::error_chain",
        ],
    ),
    rule(
        "controller::table",
        PURE,
        &["crate::identity", "crate::events::truncate"],
    ),
    rule("controller::ca_state", PURE, &["crate::identity::ca"]),
    rule(
        "tunnel",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::identity",
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::duration",
            "crate::error_chain",
            "crate::file_descriptors",
            "crate::listen",
            "crate::tasks",
        ],
    ),
    // Other modules publish their problems; `app` passes the receivers to `events`.
    rule(
        "events",
        &[AYA],
        &[
            "crate::model",
            "crate::drain",
            "crate::duration",
            "crate::error_chain",
            "crate::round_robin",
        ],
    ),
    // Other modules publish their state; `app` passes the receivers to `admin`.
    rule(
        "admin",
        NO_KERNEL_OR_KUBERNETES,
        &[
            "crate::bpf::AttachmentView",
            "crate::bpf::KernelLog",
            "crate::controller::ControllerState",
            "crate::identity::CertificateReceiver",
            "crate::identity::CertificateState",
            "crate::identity::DenyListReceiver",
            "crate::identity::DenyListState",
            "crate::model",
            "crate::explain::Explanation",
            "crate::explain::Question",
            "crate::flows::FlowFilter",
            "crate::flows::FlowView",
            "crate::flows::FlowsView",
            "crate::net::NetworkView",
            "crate::net::PacketsView",
            "crate::net::SockDiag",
            "crate::plan::HealthChecks",
            "crate::plan::HealthCheckListeners",
            "crate::reconcile::PortCounterList",
            "crate::reconcile::Histogram",
            "crate::reconcile::PortCounters",
            "crate::reconcile::ServicePart",
            "crate::reconcile::ReconcileStats",
            "crate::sockets::TerminatorView",
            "crate::source::SourceReport",
            "crate::source::ServerStatus",
            "crate::tunnel::AgentView",
            "crate::tunnel::AgentState",
            "crate::tunnel::ConnectionState",
            "crate::tunnel::NodeView",
            "crate::drain",
            "crate::clock",
            "crate::listen",
            "crate::publish",
        ],
    ),
];

/// A crate's directory, and the only crates that its `use` declarations may name.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrateRule {
    pub(super) directory: &'static str,
    pub(super) may: &'static [&'static str],
}

/// The rules for the crates that are compiled for the kernel.
pub(super) const KERNEL_CRATES: &[CrateRule] = &[
    CrateRule {
        directory: "tunnel-common",
        may: &["core", "zerocopy", "serde"],
    },
    CrateRule {
        directory: "tunnel-ebpf",
        may: &["core", "tunnel_common", "aya_ebpf", "aya_log_ebpf"],
    },
];
