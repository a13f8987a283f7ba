//! Prometheus (OpenMetrics text): kube-proxy's names for metrics with the same meaning, and Culvert's
//! own.

mod kube_proxy;
mod out;
mod service_ports;

use std::{collections::BTreeMap, fmt, sync::Arc};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Response, StatusCode};
use jiff::Timestamp;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, text::encode},
    registry::Registry,
};
use tunnel_common::{reason::Reason, table::Size};

use self::out::{Out, number};
use super::{
    AgentStatus, Answers, StartTimes, Views,
    readiness::{self, Readiness},
    server::{respond, text},
    used,
};
use crate::{
    identity::State,
    reconcile::Stats,
    source::{Report, Server},
    tunnel::{ConnectionState, NodeView},
};

/// The media type of the text format.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the rendered text as a response.
pub(super) fn answer(rendered: Result<String, fmt::Error>) -> Response<Full<Bytes>> {
    match rendered {
        Ok(body) => respond(StatusCode::OK, CONTENT_TYPE, body.into()),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

/// Renders every metric as text.
pub(super) fn render(views: Arc<Views>) -> Result<String, fmt::Error> {
    page(move |out| node(out, &views))
}

/// Renders every metric of an agent as text.
pub(super) fn render_agent(status: AgentStatus) -> Result<String, fmt::Error> {
    page(move |out| agent(out, &status))
}

/// Collects the output of a function as text.
fn page<F>(write: F) -> Result<String, fmt::Error>
where
    F: Fn(&mut Out<'_>) -> fmt::Result + Send + Sync + 'static,
{
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(write)));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

struct Page<F>(F);

impl<F> fmt::Debug for Page<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Page")
    }
}

impl<F: Fn(&mut Out<'_>) -> fmt::Result + Send + Sync + 'static> Collector for Page<F> {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        (self.0)(&mut Out(encoder))
    }
}

fn agent(out: &mut Out<'_>, status: &AgentStatus) -> fmt::Result {
    let connections = &status.tunnel.connections;
    let help = "Whether a gateway is connected";
    out.gauge("culvert_ready", help, status.ready)?;
    let counts = status.tunnel.counts.iter();
    let labelled = counts.map(|(word, n)| ([("reason", word)], *n));
    out.counters("culvert_reason", "How streams ended", labelled)?;
    let states = ConnectionState::ALL.map(|state| {
        let all = connections.iter().filter(|its| its.state == state);
        ([("state", state.label())], number(all.count()))
    });
    let help = "Connections to gateways";
    out.gauges("culvert_tunnel_connections", help, states)?;
    let streams = connections.iter().map(|its| its.traffic.streams);
    let help = "Streams that are open";
    out.gauge("culvert_tunnel_streams", help, streams.sum::<u32>())?;
    certificate(out, &status.identity)
}

/// Writes the state of the API server; nothing if it is no source.
fn api_server(out: &mut Out<'_>, server: Option<&Server>) -> fmt::Result {
    let Some(server) = server else {
        return Ok(());
    };
    let help = "Whether the API server can be asked";
    out.gauge("culvert_api_server_up", help, server.trouble.is_none())?;
    let help =
        "Whether what is served is what was known before this process, the API server being away";
    out.gauge("culvert_source_stale", help, server.stale.is_some())
}

/// Writes the remaining validity of certificates.
fn certificate(out: &mut Out<'_>, state: &State) -> fmt::Result {
    let days = |at: Timestamp| at.duration_since(Timestamp::now()).as_secs_f64() / 86_400.0;
    let files = [("cert", state.expires), ("ca", state.ca_expires)];
    let known = files.into_iter();
    let known = known.filter_map(|(file, at)| Some(([("file", file)], days(at?))));
    let help = "Days until the certificate in use expires";
    out.gauges("culvert_certificate_expiry_days", help, known)?;
    let help = "Whether the files of the certificate can't be used as they are";
    out.gauge("culvert_certificate_problem", help, state.problem.is_some())
}

fn node(out: &mut Out<'_>, views: &Views) -> fmt::Result {
    let stats = views.stats.borrow().clone();
    let (source, tunnel) = ((views.source)(), (views.tunnel)());
    let help = "Whether Services are translated as they should be";
    out.gauge("culvert_ready", help, Readiness::of(views).ready)?;
    let is_missing = readiness::nameless(views).is_some();
    let help = "Whether the name of this node is that of no Node";
    out.gauge("culvert_node_missing", help, is_missing)?;
    let took = *views.start.borrow();
    start(out, took)?;
    reasons(out, views, &stats, &source, tunnel.counts)?;
    maps(out, views, &stats)?;
    let help = "Services that were read";
    out.gauge("culvert_services", help, number(stats.services))?;
    let refused = source.problems.iter().filter(|problem| !problem.ignored);
    let help = "Objects that were not read";
    out.gauge("culvert_objects_refused", help, number(refused.count()))?;
    let refused = number(views.checks.borrow().refused.len());
    let help = "Services whose health check port is not served";
    out.gauge("culvert_health_checks_refused", help, refused)?;
    api_server(out, source.server.as_ref())?;
    let drift = [([("map", "all")], stats.drift)];
    let help = "Differences between the maps and what was known";
    out.counters("culvert_map_drift", help, drift)?;
    let help = "Services that were planned";
    out.total("culvert_planned_services", help, stats.sync.planned)?;
    let help = "From the last change to its last write";
    let delay = stats.last_delay_seconds;
    out.gauge("culvert_program_delay_seconds", help, delay)?;
    sockets(out, views, &stats)?;
    service_ports::encode(out, &(views.counted)())?;
    steering(out, views, &stats)?;
    sessions(out, &tunnel.nodes)?;
    if let Some(state) = &tunnel.identity {
        certificate(out, state)?;
    }
    let answers = views.answers.borrow().clone();
    kube_proxy::encode(out, &stats, &answers)
}

fn start(out: &mut Out<'_>, took: StartTimes) -> fmt::Result {
    let steps = [
        ("load", took.load),
        ("read", took.read),
        ("write", took.write),
        ("attach", took.attach),
    ];
    let done = steps.map(|(step, took)| took.map(|took| ([("step", step)], took)));
    let help = "How long the steps of the start took";
    out.gauges("culvert_start_seconds", help, done.into_iter().flatten())
}

fn reasons(
    out: &mut Out<'_>,
    views: &Views,
    stats: &Stats,
    source: &Report,
    mut of_daemon: BTreeMap<Reason, u64>,
) -> fmt::Result {
    let mut counts = (views.counters)();
    let ended = views.sockets.borrow().ended;
    let taken = views.checks.borrow().refused_total;
    for (reason, total) in [
        (Reason::ObjectRejected, source.refused_total),
        (Reason::FieldIgnored, source.ignored_total),
        (Reason::SocketTerminated, ended),
        (Reason::HealthPortInUse, taken),
    ] {
        *of_daemon.entry(reason).or_default() += total;
    }
    for reason in Reason::ALL.into_iter().filter(|it| !it.is_of_kernel()) {
        let of_maps = stats.counts.get(reason.label()).copied().unwrap_or(0);
        let others = of_daemon.get(&reason).copied().unwrap_or(0);
        counts.push((reason, of_maps + others));
    }
    let labelled = counts.into_iter();
    let labelled = labelled.map(|(reason, n)| ([("reason", reason.label())], n));
    let help = "How connects, datagrams and objects ended";
    out.counters("culvert_reason", help, labelled)
}

fn maps(out: &mut Out<'_>, views: &Views, stats: &Stats) -> fmt::Result {
    let maps = used(stats).filter_map(|(size, used)| Some((size.array()?.name, size, used)));
    let used = maps.clone();
    let used = used.map(|(map, _, used)| ([("map", map)], number(used)));
    out.gauges("culvert_map_entries", "Entries in use", used)?;
    let sizes = &views.setup.maps;
    let room = |size: Size| sizes.get(size.word()).copied().map_or(0.0, f64::from);
    let room = maps.map(|(map, size, _)| ([("map", map)], room(size)));
    let help = "Entries there is room for";
    out.gauges("culvert_map_capacity_entries", help, room)?;
    let refused = stats.problems.iter();
    let refused = refused.map(|(reason, n)| ([("reason", reason)], number(*n)));
    let help = "Service ports that are not programmed as planned";
    out.gauges("culvert_service_ports_refused", help, refused)
}

fn sockets(out: &mut Out<'_>, views: &Views, stats: &Stats) -> fmt::Result {
    let help = "Open sockets that were sent to a backend";
    let open = number((views.connections)());
    out.gauge("culvert_open_connections", help, open)?;
    let help = "Indices of backends that are gone, which open connections keep";
    let kept = number(stats.occupied_backends);
    out.gauge("culvert_occupied_backends", help, kept)?;
    let sockets = views.sockets.borrow().clone();
    let good = sockets.looks.saturating_sub(sockets.failures);
    let looks = [("good", good), ("failed", sockets.failures)];
    let looks = looks.map(|(result, n)| ([("result", result)], n));
    let help = "Looks for sockets of backends that are gone";
    out.counters("culvert_socket_looks", help, looks)?;
    let help = "Sockets of backends that are gone, in pods that the last look did not enter";
    out.gauge("culvert_sockets_left", help, number(sockets.left))
}

fn steering(out: &mut Out<'_>, views: &Views, stats: &Stats) -> fmt::Result {
    let steering = &stats.steering;
    let help = "Nodes that are edge nodes";
    out.gauge("culvert_edge_nodes", help, number(steering.edge_nodes))?;
    let help = "Addresses and ports of edge nodes that are steered";
    out.gauge("culvert_steering_entries", help, number(steering.entries))?;
    let help = "Nodes and ports that are not steered as they should be";
    let problems = number(steering.problems.len());
    out.gauge("culvert_steering_problems", help, problems)?;
    let help = "Whether uplinks can't be guarded, or routes to steering prefixes be kept";
    let has_problem = views.network.borrow().problem.is_some();
    out.gauge("culvert_steering_network_problem", help, has_problem)
}

fn sessions(out: &mut Out<'_>, nodes: &[NodeView]) -> fmt::Result {
    let connected = nodes.iter().filter(|node| !node.sessions.is_empty());
    let help = "Edge nodes with a session";
    out.gauge("culvert_tunnel_nodes", help, number(connected.count()))?;
    let sessions = || nodes.iter().flat_map(|node: &NodeView| &node.sessions);
    let help = "Sessions of agents";
    out.gauge("culvert_tunnel_sessions", help, number(sessions().count()))?;
    let streams: u32 = sessions().map(|session| session.traffic.streams).sum();
    let help = "Streams that are open";
    out.gauge("culvert_tunnel_streams", help, streams)
}

#[cfg(test)]
mod tests;
