//! `/metrics` in the OpenMetrics text format: kube-proxy's metrics and Culvert's own.

mod encoder;
mod kube_proxy;
mod service_ports;

use std::{collections::BTreeMap, fmt, sync::Arc};

use hyper::{Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, text::encode},
    registry::Registry,
};
use tunnel_common::{reason::Reason, table::MapSize};

use self::encoder::{MetricsEncoder, number};
use super::{
    AgentStatus, HealthResponses, NodeViews, StartTimes,
    http_server::{ResponseBody, respond, text},
    readiness::{self, Readiness},
    used_entries,
};
use crate::{
    controller::ControllerState,
    identity::CertificateState,
    reconcile::ReconcileStats,
    source::{ServerStatus, SourceReport},
    tunnel::{ConnectionState, NodeView},
};

/// The media type of the OpenMetrics text format.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Responds with the rendered metrics.
pub(super) fn response(rendered: Result<String, fmt::Error>) -> Response<ResponseBody> {
    match rendered {
        Ok(body) => respond(StatusCode::OK, CONTENT_TYPE, body.into()),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

/// Renders all of a node's metrics as text.
pub(super) fn render(views: Arc<NodeViews>) -> Result<String, fmt::Error> {
    render_with(move |out| encode_node(out, &views))
}

/// Renders all of an agent's metrics as text.
pub(super) fn render_agent(status: AgentStatus) -> Result<String, fmt::Error> {
    render_with(move |out| encode_agent(out, &status))
}

/// Renders all of a controller's metrics as text.
pub(super) fn render_controller(
    state: ControllerState,
    is_ready: bool,
) -> Result<String, fmt::Error> {
    render_with(move |out| encode_controller(out, &state, is_ready))
}

/// Renders, as text, the metrics that `write` encodes.
fn render_with<F>(write: F) -> Result<String, fmt::Error>
where
    F: Fn(&mut MetricsEncoder<'_>) -> fmt::Result + Send + Sync + 'static,
{
    let mut registry = Registry::default();
    registry.register_collector(Box::new(CollectorFn(write)));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// A collector that calls a function to encode the metrics.
struct CollectorFn<F>(F);

impl<F> fmt::Debug for CollectorFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CollectorFn")
    }
}

impl<F: Fn(&mut MetricsEncoder<'_>) -> fmt::Result + Send + Sync + 'static> Collector
    for CollectorFn<F>
{
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.0)(&mut MetricsEncoder(encoder))
    }
}

fn encode_agent(out: &mut MetricsEncoder<'_>, status: &AgentStatus) -> fmt::Result {
    let connections = &status.tunnel.connections;
    let help = "1 if a gateway is connected";
    out.gauge("culvert_ready", help, status.ready)?;
    let counts = status.tunnel.counts.iter();
    let labelled = counts.map(|(reason, n)| ([("reason", reason)], *n));
    out.counters("culvert_reason", "Outcomes of streams", labelled)?;
    let states = ConnectionState::ALL.map(|state| {
        let all = connections.iter().filter(|its| its.state == state);
        ([("state", state.label())], number(all.count()))
    });
    let help = "Connections to gateways";
    out.gauges("culvert_tunnel_connections", help, states)?;
    let streams = connections.iter().map(|its| its.traffic.streams);
    let help = "Open streams";
    out.gauge("culvert_tunnel_streams", help, streams.sum::<u32>())?;
    encode_certificate(out, &status.identity)
}

fn encode_controller(
    out: &mut MetricsEncoder<'_>,
    state: &ControllerState,
    is_ready: bool,
) -> fmt::Result {
    let help = "1 if the controller follows the requests and its CA can sign";
    out.gauge("culvert_ready", help, is_ready)?;
    let issued = state.issued.iter();
    let issued = issued.map(|(role, count)| ([("role", *role)], *count));
    let help = "Certificates that this controller has issued";
    out.counters("culvert_certificates_issued", help, issued)?;
    let denied = state.denied.iter();
    let denied =
        denied.map(|((role, reason), count)| ([("role", *role), ("reason", *reason)], *count));
    let help = "Requests for certificates that this controller has denied";
    out.counters("culvert_certificates_denied", help, denied)?;
    let help = "Requests whose handling has failed, and that are handled again";
    let failed = [([("role", "all")], state.failed)];
    out.counters("culvert_certificate_request_failures", help, failed)?;
    let help = "Requests that wait";
    out.gauge(
        "culvert_certificate_requests_waiting",
        help,
        number(state.waiting),
    )?;
    let expires = state.ca_expires.map(|at| at.as_duration().as_secs_f64());
    let expires = expires.map(|at| ([("file", "ca")], at));
    let help = "The expiration of the certificate in use, as a Unix time";
    out.gauges(
        "culvert_certificate_expiration_timestamp_seconds",
        help,
        expires,
    )
}

/// Encodes the metrics about the API server, if it is a source.
fn encode_api_server(out: &mut MetricsEncoder<'_>, server: Option<&ServerStatus>) -> fmt::Result {
    let Some(server) = server else {
        return Ok(());
    };
    let help = "1 if the API server is reachable";
    out.gauge("culvert_api_server_up", help, server.error.is_none())?;
    let help = "1 if the last snapshot is used, since the API server is unreachable";
    out.gauge("culvert_source_stale", help, server.stale.is_some())
}

/// Encodes the certificate's metrics: the expiration times, and whether its files are invalid.
fn encode_certificate(out: &mut MetricsEncoder<'_>, state: &CertificateState) -> fmt::Result {
    let seconds = |at: Timestamp| at.as_duration().as_secs_f64();
    let files = [("cert", state.expires), ("ca", state.ca_expires)];
    let known = files.into_iter();
    let known = known.filter_map(|(file, at)| Some(([("file", file)], seconds(at?))));
    let help = "The expiration of the certificate in use, as a Unix time";
    out.gauges(
        "culvert_certificate_expiration_timestamp_seconds",
        help,
        known,
    )?;
    let help = "1 if the files of the certificate are invalid";
    out.gauge("culvert_certificate_error", help, state.problem.is_some())?;
    let Some(request) = &state.request else {
        return Ok(());
    };
    let help = "1 if the last try to get a certificate from the API server was without success";
    let is_failing = request.problem.is_some();
    out.gauge("culvert_certificate_request_error", help, is_failing)?;
    let help = "Certificates that were received from the API server";
    let received = [([("result", "received")], request.received)];
    out.counters("culvert_certificate_requests", help, received)
}

fn encode_node(out: &mut MetricsEncoder<'_>, views: &NodeViews) -> fmt::Result {
    let stats = views.stats.borrow().clone();
    let (source, tunnel) = ((views.source_report)(), (views.tunnel)());
    let help = "1 if all Services are programmed";
    out.gauge("culvert_ready", help, Readiness::of(views).ready)?;
    let is_missing = readiness::missing_node(views).is_some();
    let help = "1 if no Node has the name of this node";
    out.gauge("culvert_node_missing", help, is_missing)?;
    let durations = *views.start_times.borrow();
    encode_start(out, durations)?;
    let kernel_counts = (views.kernel_counters)();
    encode_reasons(
        out,
        views,
        (&stats, &source),
        (kernel_counts.clone(), tunnel.counts),
    )?;
    encode_maps(out, views, &stats)?;
    encode_programs(out, views, &stats)?;
    encode_flows(out, views)?;
    let help = "Services";
    out.gauge("culvert_services", help, number(stats.services))?;
    let refused = source.problems.iter().filter(|problem| !problem.ignored);
    let help = "Objects that are not read, since they are invalid";
    out.gauge("culvert_rejected_objects", help, number(refused.count()))?;
    let refused = number(views.health_checks.borrow().unserved.len());
    let help = "Services whose health check node port is not served on every address";
    out.gauge("culvert_unserved_health_check_node_ports", help, refused)?;
    encode_api_server(out, source.server.as_ref())?;
    let drift = [([("map", "all")], stats.drift)];
    let help = "Differences found between the maps and the desired state";
    out.counters("culvert_map_drift", help, drift)?;
    let help = "Plans computed for Services";
    out.total("culvert_planned_services", help, stats.sync.plans_computed)?;
    let help = "Time from the last change to its last write";
    let delay = stats.programming_latency_seconds;
    out.gauge("culvert_programming_latency_seconds", help, delay)?;
    encode_sockets(out, views, &stats)?;
    service_ports::encode(out, &(views.port_counts)())?;
    encode_steering(out, views, &stats)?;
    encode_sessions(out, &tunnel.nodes)?;
    if let Some(state) = &tunnel.identity {
        encode_certificate(out, state)?;
    }
    if let Some(state) = &tunnel.deny_list {
        let help = "1 if the file of the deny list is invalid";
        out.gauge("culvert_deny_list_error", help, state.problem.is_some())?;
    }
    let responses = views.health_responses.borrow().clone();
    kube_proxy::encode(out, &stats, &responses)?;
    kube_proxy::encode_reconciler(out, &kernel_counts)
}

fn encode_start(out: &mut MetricsEncoder<'_>, durations: StartTimes) -> fmt::Result {
    let steps = [
        ("load", durations.load),
        ("sync", durations.sync),
        ("write", durations.write),
        ("attach", durations.attach),
    ];
    let done = steps.map(|(step, took)| took.map(|took| ([("step", step)], took)));
    let help = "Duration of the steps of the startup";
    out.gauges(
        "culvert_startup_duration_seconds",
        help,
        done.into_iter().flatten(),
    )
}

fn encode_reasons(
    out: &mut MetricsEncoder<'_>,
    views: &NodeViews,
    (stats, source): (&ReconcileStats, &SourceReport),
    (mut counts, mut daemon_counts): (Vec<(Reason, u64)>, BTreeMap<Reason, u64>),
) -> fmt::Result {
    let terminated = views.sockets.borrow().terminated;
    let restored = views.attachment.borrow().restored_total;
    let ports_in_use = views.health_checks.borrow().ports_in_use_total;
    for (reason, total) in [
        (Reason::ObjectRejected, source.rejected_total),
        (Reason::FieldIgnored, source.ignored_total),
        (Reason::SocketTerminated, terminated),
        (Reason::ProgramRestored, restored),
        (Reason::HealthPortInUse, ports_in_use),
    ] {
        *daemon_counts.entry(reason).or_default() += total;
    }
    for reason in Reason::ALL
        .into_iter()
        .filter(|it| !it.is_counted_by_kernel())
    {
        let of_maps = stats.counts.get(reason.label()).copied().unwrap_or(0);
        let others = daemon_counts.get(&reason).copied().unwrap_or(0);
        counts.push((reason, of_maps + others));
    }
    let labelled = counts.into_iter();
    let labelled = labelled.map(|(reason, n)| ([("reason", reason.label())], n));
    let help = "Outcomes of connects, datagrams and objects";
    out.counters("culvert_reason", help, labelled)
}

fn encode_flows(out: &mut MetricsEncoder<'_>, views: &NodeViews) -> fmt::Result {
    let flows = views.flows.borrow().clone();
    let states = flows.states.iter();
    let states = states.map(|(state, n)| ([("state", state.as_str())], number(*n)));
    let help = "Flows of packets that are translated";
    out.gauges("culvert_flows", help, states)?;
    let help = "1 if packets cannot be translated on all links";
    let has_problem = views.packets.borrow().problem.is_some() || flows.problem.is_some();
    out.gauge("culvert_packets_error", help, has_problem)
}

fn encode_maps(
    out: &mut MetricsEncoder<'_>,
    views: &NodeViews,
    stats: &ReconcileStats,
) -> fmt::Result {
    let flows = views.flows.borrow().clone();
    // The size of the map of flows is a number of flows, but a flow has several entries.
    let of_flows = (flows.capacity > 0).then_some([("map", MapSize::Flows.label())]);
    let maps = used_entries(stats).map(|(size, used)| (size.label(), size, used));
    let used = maps.clone();
    let used = used.map(|(map, _, used)| ([("map", map)], number(used)));
    let used = used.chain(of_flows.map(|map| (map, number(flows.entries))));
    out.gauges("culvert_map_entries", "Entries in use", used)?;
    let sizes = &views.setup.maps;
    let capacities = |size: MapSize| sizes.get(size.key()).copied().map_or(0.0, f64::from);
    let capacities = maps.map(|(map, size, _)| ([("map", map)], capacities(size)));
    let capacities = capacities.chain(of_flows.map(|map| (map, f64::from(flows.capacity))));
    let help = "The capacity in entries";
    out.gauges("culvert_map_capacity_entries", help, capacities)?;
    let refused = stats.problems.iter();
    let refused = refused.map(|(reason, n)| ([("reason", reason)], number(*n)));
    let help = "Service ports that are not programmed as desired";
    out.gauges("culvert_unprogrammed_service_ports", help, refused)?;
    let beyond = stats.namespaces_beyond_share.iter();
    let beyond = beyond.map(|(namespace, n)| ([("namespace", namespace)], number(*n)));
    let help = "Service ports that do not fit into the share of their namespace";
    out.gauges("culvert_service_ports_beyond_share", help, beyond)
}

fn encode_programs(
    out: &mut MetricsEncoder<'_>,
    views: &NodeViews,
    stats: &ReconcileStats,
) -> fmt::Result {
    let programs = views.attachment.borrow().clone();
    let help = "Programs that are attached to the cgroup and in effect";
    if let Some(in_effect) = programs.in_effect {
        out.gauge("culvert_programs_in_effect", help, number(in_effect))?;
    }
    let help = "1 if a program is not in effect, if programs or maps are not pinned, or if the probe of the programs fails";
    let has_problem = !programs.problems.is_empty() || stats.probe_problem.is_some();
    out.gauge("culvert_programs_error", help, has_problem)
}

fn encode_sockets(
    out: &mut MetricsEncoder<'_>,
    views: &NodeViews,
    stats: &ReconcileStats,
) -> fmt::Result {
    let help = "Open sockets that were sent to a backend";
    let open = number((views.open_connections)());
    out.gauge("culvert_open_connections", help, open)?;
    let help = "Removed backends with open connections";
    let kept = number(stats.draining_backends);
    out.gauge("culvert_draining_backends", help, kept)?;
    let sockets = views.sockets.borrow().clone();
    let success = sockets.scans.saturating_sub(sockets.failed_scans);
    let scans = [("success", success), ("failure", sockets.failed_scans)];
    let scans = scans.map(|(result, n)| ([("result", result)], n));
    let help = "Scans for sockets of removed backends";
    out.counters("culvert_socket_scans", help, scans)?;
    let help = "Sockets of removed backends in pods that the last scan did not enter";
    out.gauge("culvert_stale_sockets", help, number(sockets.stale))
}

fn encode_steering(
    out: &mut MetricsEncoder<'_>,
    views: &NodeViews,
    stats: &ReconcileStats,
) -> fmt::Result {
    let steering = &stats.steering;
    let help = "Edge nodes";
    out.gauge("culvert_edge_nodes", help, number(steering.edge_nodes))?;
    let help = "Steered addresses and ports of edge nodes";
    out.gauge("culvert_steering_entries", help, number(steering.entries))?;
    let help = "Nodes and ports that are not steered because of an error";
    let problems = number(steering.problems.len());
    out.gauge("culvert_steering_errors", help, problems)?;
    let help = "1 if a guard of an uplink or a route to a steering prefix is missing";
    let has_problem = views.network.borrow().problem.is_some();
    out.gauge("culvert_steering_network_error", help, has_problem)
}

fn encode_sessions(out: &mut MetricsEncoder<'_>, nodes: &[NodeView]) -> fmt::Result {
    let connected = nodes.iter().filter(|node| !node.sessions.is_empty());
    let help = "Edge nodes with a session";
    out.gauge(
        "culvert_tunnel_connected_nodes",
        help,
        number(connected.count()),
    )?;
    let sessions = || nodes.iter().flat_map(|node: &NodeView| &node.sessions);
    let help = "Sessions of agents";
    out.gauge("culvert_tunnel_sessions", help, number(sessions().count()))?;
    let streams: u32 = sessions().map(|session| session.traffic.streams).sum();
    let help = "Open streams";
    out.gauge("culvert_tunnel_streams", help, streams)?;
    let now = Timestamp::now();
    let expiring = EXPIRING_WITHIN.map(|(label, hours)| {
        let end = now.saturating_add(SignedDuration::from_hours(hours));
        let end = end.unwrap_or(Timestamp::MAX);
        let expiring = sessions().filter(|session| session.certificate_expires <= end);
        ([("within", label)], number(expiring.count()))
    });
    let help = "Sessions whose agents' certificates expire within a time";
    out.gauges("culvert_tunnel_sessions_expiring", help, expiring)
}

/// The times within which certificates are counted as expiring, in hours.
const EXPIRING_WITHIN: [(&str, i64); 4] = [("1h", 1), ("1d", 24), ("7d", 7 * 24), ("30d", 30 * 24)];

#[cfg(test)]
mod tests;
