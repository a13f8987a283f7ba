//! The HTTP endpoints for status, metrics and health. This module only reads what other modules publish, with one
//! exception: the admin socket can end the sessions of a node.
//!
//! - `node_routes`: the HTTP paths that each listener of `culvert node` serves
//! - `agent_routes`: the HTTP paths that `culvert agent` serves
//! - `controller_routes`: the HTTP paths that `culvert controller` serves
//! - `json_list`: responses that are created while the client reads them
//! - `service_list`: `/services`
//! - `flow_list`: `/flows`
//! - `explain_query`: the query of `/explain`
//! - `status`: `/status`
//! - `metrics`: `/metrics`
//! - `readiness`: `/readyz`, and the readiness check that the status, the metrics and the log share
//! - `healthz`: `/healthz` and `/livez`, compatible with kube-proxy
//! - `health_check_node_ports`: the Services' health check node ports
//! - `client`: identifies the clients of a listener
//! - `connection_limit`: the limits on the open connections of an HTTP listener
//! - `flood_filter`: a socket filter against clients that flood a listener with connections
//! - `http_server`: the HTTP server on TCP ports and on the admin socket
//! - `http_client`: the HTTP client that the command line uses
//! - `fixture`: helpers for tests

mod agent_routes;
mod client;
mod connection_limit;
mod controller_routes;
mod explain_query;
#[cfg(test)]
mod fixture;
mod flood_filter;
mod flow_list;
mod health_check_node_ports;
mod healthz;
mod http_client;
mod http_server;
mod json_list;
mod metrics;
mod node_routes;
mod readiness;
mod service_list;
mod status;

use std::{collections::BTreeMap, io, pin::Pin, time::Duration};

use tokio::sync::watch;
use tunnel_common::reason::Reason;

pub use self::{
    agent_routes::{AgentSetup, AgentStatus, AgentViews},
    controller_routes::ControllerViews,
    health_check_node_ports::{HealthCheckServer, HealthChecksView},
    http_client::{RequestError, post, request},
    http_server::{ResponseBody, Routes, SocketError, serve_tcp, serve_unix},
    node_routes::{END_SESSIONS_PATH, EndedSessions, NodeListener, NodeRoutes},
    readiness::log_readiness,
    status::{NodeSetup, NodeStatus, StartTimes, used_entries},
};
use crate::{
    bpf::{AttachmentView, KernelLog},
    explain::{Explanation, Question},
    flows::{FlowFilter, FlowView, FlowsView},
    identity::{CertificateState, DenyListState},
    listen::UnboundPorts,
    net::{NetworkView, PacketsView},
    reconcile::{PortCounterList, ReconcileStats, ServicePart},
    sockets::TerminatorView,
    source::SourceReport,
    tunnel::NodeView,
};

/// A function that returns the current value each time it is called.
pub type Getter<T> = Box<dyn Fn() -> T + Send + Sync>;

/// The parts of a list of Services, each of which is created when it is requested.
pub type ServiceParts = Box<dyn Iterator<Item = ServicePart> + Send>;

/// A function that returns the parts of all Services, or only of those with the given name.
pub type ListServices = Box<dyn Fn(Option<&str>) -> ServiceParts + Send + Sync>;

/// Flows, each of which is read when it is requested.
pub type FlowParts = Box<dyn Iterator<Item = io::Result<FlowView>> + Send>;

/// A function that lists the flows that match a filter.
pub type ListFlows = Box<dyn Fn(FlowFilter) -> FlowParts + Send + Sync>;

/// A function that explains what becomes of a packet or connection. Returns an error if the question can't be answered.
pub type Explain = Box<dyn Fn(Question) -> ExplanationFuture + Send + Sync>;

/// The future of an explanation.
pub type ExplanationFuture =
    Pin<Box<dyn Future<Output = Result<Explanation, String>> + Send + 'static>>;

/// A function that ends all sessions of a node, and returns how many there were.
pub type EndSessions = Box<dyn Fn(&str) -> usize + Send + Sync>;

/// The number of health responses sent so far, by path and status code.
pub type HealthResponses = BTreeMap<(&'static str, u16), u64>;

/// The state of a node's gateway and ingress; empty if the tunnel is off.
#[derive(Clone, Debug, Default)]
pub struct TunnelView {
    /// The nodes that have or had a session, have steered ports, or were the target of a stream request.
    pub nodes: Vec<NodeView>,
    /// The number of streams that have ended, by reason.
    pub counts: BTreeMap<Reason, u64>,
    /// The state of the gateway's certificate; `None` if this node runs no gateway.
    pub identity: Option<CertificateState>,
    /// The state of the gateway's deny list; `None` if it has none.
    pub deny_list: Option<DenyListState>,
}

/// The state of `culvert node`, as published by its modules.
pub struct NodeViews {
    /// Values that never change while the daemon runs.
    pub setup: NodeSetup,
    /// The effective config, in the format of `/configz`.
    pub config: serde_json::Value,
    /// The current step of the startup or shutdown, such as `waiting for the sources`; `None` in between.
    pub starting: watch::Receiver<Option<String>>,
    /// The reason why the daemon is not ready while its tunnel drains.
    pub stopping: watch::Receiver<Option<String>>,
    /// The time that each startup step took.
    pub start_times: watch::Receiver<StartTimes>,
    /// The reconciler's statistics.
    pub stats: watch::Receiver<ReconcileStats>,
    /// The time of the monotonic clock at which the reconcile loop last waited for events.
    pub heartbeat: watch::Receiver<Option<Duration>>,
    /// The kernel program whose events are logged, if any.
    pub kernel_log: watch::Receiver<Option<KernelLog>>,
    /// The state of the attached programs; empty until the first check.
    pub attachment: watch::Receiver<AttachmentView>,
    /// The guarded uplinks and the steering routes; empty if steering is off.
    pub network: watch::Receiver<NetworkView>,
    /// The state of the task that terminates the sockets of removed backends.
    pub sockets: watch::Receiver<TerminatorView>,
    /// The uplinks whose packets are translated.
    pub packets: watch::Receiver<PacketsView>,
    /// The number of flows, as of the last sweep.
    pub flows: watch::Receiver<FlowsView>,
    /// Lists flows.
    pub list_flows: ListFlows,
    /// Explains packets and connections.
    pub explain: Explain,
    /// Lists the programmed state of all Services, or only of those with the given name.
    pub services: ListServices,
    /// The counters of the Service ports that have their own metrics.
    pub port_counts: Getter<PortCounterList>,
    /// The state of the gateway and the ingress.
    pub tunnel: Getter<TunnelView>,
    /// Ends all sessions of a node.
    pub end_sessions: EndSessions,
    /// The number of objects that the sources have read, and the problems found in them.
    pub source_report: Getter<SourceReport>,
    /// The kernel programs' counters; empty if they can't be read.
    pub kernel_counters: Getter<Vec<(Reason, u64)>>,
    /// The number of open sockets connected to a backend, as counted by the kernel programs.
    pub open_connections: Getter<u64>,
    /// The ports that are not bound yet, each with the error from the last attempt.
    pub unbound_ports: UnboundPorts,
    /// The state of the Services' health check node ports.
    pub health_checks: watch::Sender<HealthChecksView>,
    /// The number of health responses sent so far, by path and status code.
    pub health_responses: watch::Sender<HealthResponses>,
}
