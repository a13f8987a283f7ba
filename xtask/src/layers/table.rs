//! The dependency table as data.

/// The paths that one module may and must not use, in the form of `use` lines; the longest entry that
/// matches a path decides. Another module of the same crate is refused unless it is in `may`; an
/// external crate is permitted unless it is in `never`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// A module of `tunnel-userspace`; `a::b` overrides `a` for its submodule.
    pub(super) module: &'static str,
    pub(super) may: &'static [&'static str],
    pub(super) never: &'static [&'static str],
}

/// The crates that only some modules may use.
const KERNEL: &str = "aya";
const OBJECTS: &str = "k8s_openapi";
const CLIENT: &str = "kube";
/// None of these crates.
const NO_OTHER: &[&str] = &[KERNEL, OBJECTS, CLIENT];
/// No runtime either.
const NO_RUNTIME: &[&str] = &[KERNEL, OBJECTS, CLIENT, "tokio"];

/// No I/O, clock or random numbers either.
const PURE: &[&str] = &[
    KERNEL,
    OBJECTS,
    CLIENT,
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

/// The modules of `tunnel-userspace`.
pub(super) const USERSPACE: &[Rule] = &[
    rule(
        "main",
        NO_OTHER,
        &[
            "crate::app",
            "crate::cli",
            "crate::config",
            "crate::memory",
            "crate::telemetry",
        ],
    ),
    // The client of `admin` returns these views.
    rule(
        "cli",
        NO_OTHER,
        &[
            "crate::admin",
            "crate::config",
            "crate::identity::ca",
            "crate::reconcile::EndpointView",
            "crate::reconcile::FrontView",
            "crate::reconcile::PortView",
            "crate::reconcile::ServiceView",
            "crate::sockets::Pods",
            "crate::sockets::View",
            "crate::source::Report",
            "crate::source::Server",
            "crate::tunnel::ConnectionView",
            "crate::tunnel::NodeView",
            "crate::tunnel::SessionView",
            "crate::tunnel::TrafficView",
        ],
    ),
    rule(
        "fuzz",
        NO_OTHER,
        &[
            "crate::bpf::places_in",
            "crate::config::Config",
            "crate::net::messages_in",
            "crate::source::file::reads_alike",
            "crate::tunnel::read_heads",
        ],
    ),
    rule("app", &[], &["crate"]),
    // The parts' own settings types, and the types of parsed texts.
    rule(
        "config",
        NO_RUNTIME,
        &[
            "crate::bpf::KernelLog",
            "crate::bpf::Level",
            "crate::duration",
            "crate::identity::Files",
            "crate::identity::is_subdomain",
            "crate::model::Algorithm",
            "crate::model::ExternalIps",
            "crate::model::Selector",
            "crate::model::TopologyKeys",
            "crate::plan::NodePortAddresses",
            "crate::sockets",
            "crate::source::file",
            "crate::source::kube",
            "crate::tunnel::Limits",
            "crate::tunnel::agent",
            "crate::tunnel::gateway",
        ],
    ),
    rule("memory", NO_RUNTIME, &[]),
    rule("telemetry", NO_OTHER, &[]),
    rule("clock", NO_RUNTIME, &[]),
    rule("capabilities", NO_RUNTIME, &[]),
    rule("failure", NO_RUNTIME, &[]),
    rule("duration", NO_RUNTIME, &[]),
    rule("parallel", NO_RUNTIME, &[]),
    rule("drain", NO_OTHER, &[]),
    rule("latest", NO_OTHER, &[]),
    rule("listen", NO_OTHER, &["crate::drain"]),
    rule("tasks", NO_OTHER, &[]),
    rule(
        "source",
        &[KERNEL, CLIENT, "tunnel_common::service"],
        &[
            "crate::k8s",
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::latest",
            "crate::failure",
            "crate::parallel",
            "crate::tasks",
        ],
    ),
    rule(
        "source::kube",
        &[KERNEL, "tunnel_common::service"],
        &[
            "crate::k8s",
            "crate::model",
            "crate::source",
            "crate::events::Settings",
            "crate::clock",
            "crate::drain",
            "crate::duration",
            "crate::latest",
            "crate::failure",
            "crate::tasks",
        ],
    ),
    rule("k8s", &[KERNEL, CLIENT, "tokio"], &["crate::model"]),
    rule(
        "model",
        &[KERNEL, OBJECTS, CLIENT, "tokio", "tunnel_common"],
        &["tunnel_common::addr", "tunnel_common::reason"],
    ),
    rule("plan", PURE, &["crate::model"]),
    rule(
        "reconcile",
        NO_OTHER,
        &[
            "crate::model",
            "crate::plan",
            "crate::clock",
            "crate::drain",
            "crate::latest",
            "crate::parallel",
            "crate::tasks",
        ],
    ),
    rule(
        "reconcile::desired",
        PURE,
        &["crate::model", "crate::plan", "crate::parallel"],
    ),
    rule(
        "reconcile::sync::diff",
        PURE,
        &["crate::model", "crate::plan"],
    ),
    // `reconcile` and `sockets` for the traits that `bpf` implements.
    rule(
        "bpf",
        &[OBJECTS, CLIENT],
        &[
            "crate::net",
            "crate::reconcile",
            "crate::sockets",
            "crate::capabilities",
        ],
    ),
    rule(
        "net",
        NO_OTHER,
        &[
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::latest",
            "crate::failure",
            "crate::tasks",
        ],
    ),
    rule(
        "sockets",
        NO_OTHER,
        &[
            "crate::net",
            "crate::capabilities",
            "crate::drain",
            "crate::failure",
            "crate::listen",
        ],
    ),
    rule(
        "identity",
        NO_OTHER,
        &["crate::clock", "crate::drain", "crate::tasks"],
    ),
    rule(
        "tunnel",
        NO_OTHER,
        &[
            "crate::identity",
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::duration",
            "crate::failure",
            "crate::listen",
            "crate::tasks",
        ],
    ),
    // The concerns of the parts; `app` passes the receivers.
    rule(
        "events",
        &[KERNEL],
        &[
            "crate::model",
            "crate::drain",
            "crate::duration",
            "crate::failure",
        ],
    ),
    // The published views of the parts; `app` passes the receivers.
    rule(
        "admin",
        NO_OTHER,
        &[
            "crate::bpf::KernelLog",
            "crate::identity::Receiver",
            "crate::identity::State",
            "crate::model",
            "crate::net::View",
            "crate::plan::HealthChecks",
            "crate::plan::Listeners",
            "crate::reconcile::Counted",
            "crate::reconcile::Histogram",
            "crate::reconcile::PortCounts",
            "crate::reconcile::ServiceView",
            "crate::reconcile::Stats",
            "crate::sockets::View",
            "crate::source::Report",
            "crate::source::Server",
            "crate::tunnel::AgentView",
            "crate::tunnel::Board",
            "crate::tunnel::ConnectionState",
            "crate::tunnel::NodeView",
            "crate::drain",
            "crate::listen",
            "crate::latest",
        ],
    ),
];

/// A crate whose `use` lines may begin only with these names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closed {
    pub(super) folder: &'static str,
    pub(super) may: &'static [&'static str],
}

/// The crates of the kernel programs.
pub(super) const CLOSED: &[Closed] = &[
    Closed {
        folder: "tunnel-common",
        may: &["core", "zerocopy", "serde"],
    },
    Closed {
        folder: "tunnel-ebpf",
        may: &["core", "tunnel_common", "aya_ebpf", "aya_log_ebpf"],
    },
];
