//! Who may know whom: the dependency table as data.

/// What one module may and must not name. Paths are written as `use` lines write them; the longest
/// entry that fits a path decides. Another module of the same crate is refused unless it stands in
/// `may`; an external crate is allowed unless it stands in `never`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// A module of `tunnel-userspace`; `a::b` overrides `a` for its part.
    pub(super) module: &'static str,
    pub(super) may: &'static [&'static str],
    pub(super) never: &'static [&'static str],
}

/// What only some modules may name.
const KERNEL: &str = "aya";
const OBJECTS: &str = "k8s_openapi";
const CLIENT: &str = "kube";
const RUNTIME: &str = "tokio";

/// The modules of `tunnel-userspace`.
pub(super) const USERSPACE: &[Rule] = &[
    Rule {
        module: "main",
        may: &[
            "crate::app",
            "crate::cli",
            "crate::config",
            "crate::memory",
            "crate::telemetry",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "cli",
        // The views are what the client of `admin` returns.
        may: &[
            "crate::admin",
            "crate::bpf",
            "crate::config",
            "crate::identity::ca",
            "crate::net",
            "crate::reconcile::EndpointView",
            "crate::reconcile::FrontView",
            "crate::reconcile::PortView",
            "crate::reconcile::ServiceView",
            "crate::sockets::Pods",
            "crate::sockets::View",
            "crate::source::Report",
            "crate::source::Server",
            "crate::tunnel::ConnectionState",
            "crate::tunnel::ConnectionView",
            "crate::tunnel::NodeView",
            "crate::tunnel::SessionView",
            "crate::tunnel::TrafficView",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "app",
        may: &["crate"],
        never: &[],
    },
    Rule {
        module: "config",
        // The parts' own settings types, and what their texts are read as.
        may: &[
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
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME],
    },
    Rule {
        module: "memory",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME],
    },
    Rule {
        module: "telemetry",
        may: &["crate::config"],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "clock",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME],
    },
    Rule {
        module: "failure",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME],
    },
    Rule {
        module: "duration",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME],
    },
    Rule {
        module: "parallel",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME],
    },
    Rule {
        module: "drain",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "latest",
        may: &[],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "listen",
        may: &["crate::drain"],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "tasks",
        may: &["crate::clock", "crate::drain"],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "source",
        may: &[
            "crate::k8s",
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::latest",
            "crate::failure",
            "crate::parallel",
            "crate::tasks",
        ],
        never: &[KERNEL, CLIENT, "tunnel_common::service"],
    },
    Rule {
        module: "source::kube",
        may: &[
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
        never: &[KERNEL, "tunnel_common::service"],
    },
    Rule {
        module: "k8s",
        may: &["crate::model"],
        never: &[KERNEL, CLIENT, RUNTIME],
    },
    Rule {
        module: "model",
        may: &["tunnel_common::addr", "tunnel_common::reason"],
        never: &[KERNEL, OBJECTS, CLIENT, RUNTIME, "tunnel_common"],
    },
    Rule {
        module: "plan",
        may: &["crate::model"],
        never: &[
            KERNEL,
            OBJECTS,
            CLIENT,
            RUNTIME,
            // No I/O, no clock, no chance.
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
        ],
    },
    Rule {
        module: "reconcile",
        may: &[
            "crate::model",
            "crate::plan",
            "crate::clock",
            "crate::drain",
            "crate::latest",
            "crate::parallel",
            "crate::tasks",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    // `reconcile` and `sockets` for the traits that are implemented here.
    Rule {
        module: "bpf",
        may: &["crate::net", "crate::reconcile", "crate::sockets"],
        never: &[OBJECTS, CLIENT],
    },
    Rule {
        module: "net",
        may: &[
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::latest",
            "crate::failure",
            "crate::tasks",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "sockets",
        may: &[
            "crate::net",
            "crate::clock",
            "crate::drain",
            "crate::failure",
            "crate::listen",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "identity",
        may: &["crate::clock", "crate::drain", "crate::tasks"],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "tunnel",
        may: &[
            "crate::identity",
            "crate::model",
            "crate::clock",
            "crate::drain",
            "crate::duration",
            "crate::failure",
            "crate::listen",
            "crate::tasks",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
    Rule {
        module: "events",
        // What the parts are concerned with; `app` hands in the receiving ends.
        may: &[
            "crate::model",
            "crate::drain",
            "crate::duration",
            "crate::failure",
        ],
        never: &[KERNEL],
    },
    Rule {
        module: "admin",
        // What the parts publish of themselves; `app` hands in the receiving ends.
        may: &[
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
            "crate::clock",
            "crate::drain",
            "crate::listen",
            "crate::latest",
            "crate::tasks",
        ],
        never: &[KERNEL, OBJECTS, CLIENT],
    },
];

/// A crate whose `use` lines may begin with nothing but these names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closed {
    pub(super) folder: &'static str,
    pub(super) may: &'static [&'static str],
}

/// The crates that the kernel programs are made from.
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
