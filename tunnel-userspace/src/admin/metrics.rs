//! Prometheus (OpenMetrics text): kube-proxy's names where they mean the same, ours beside them.

mod kube_proxy;
mod out;
mod service_ports;

use std::{collections::BTreeMap, fmt, sync::Arc};

use jiff::Timestamp;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, text},
    registry::Registry,
};
use tunnel_common::{reason::Reason, table::Size};

use self::out::{Out, number};
use super::{
    AgentStatus, StartTimes, Views,
    ready::{self, Readiness},
    used,
};
use crate::{
    identity::State,
    reconcile::{Counted, Stats},
    source::{Report, Server},
    tunnel::{ConnectionState, NodeView},
};

/// The media type of the text format.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Counts of answers by health endpoint and code.
pub(super) type Answers = BTreeMap<(&'static str, u16), u64>;

/// Every metric, as text.
pub(super) fn render(
    views: &Arc<Views>,
    answers: Answers,
    counted: Counted,
) -> Result<String, fmt::Error> {
    collect(Metrics {
        views: Arc::clone(views),
        answers,
        counted,
    })
}

/// Every metric of an agent, as text.
pub(super) fn render_agent(status: &AgentStatus) -> Result<String, fmt::Error> {
    collect(AgentMetrics(status.clone()))
}

fn collect(collector: impl Collector) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(collector));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct AgentMetrics(AgentStatus);

impl Collector for AgentMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let AgentStatus {
            ready,
            not_ready: _,
            setup: _,
            tunnel,
            identity,
        } = &self.0;
        let help = "Whether a gateway is connected";
        out.gauge("culvert_ready", help, u32::from(*ready))?;
        let labelled = tunnel
            .counts
            .iter()
            .map(|(word, n)| ([("reason", word.as_str())], *n));
        out.counters("culvert_reason", "How streams ended", labelled)?;
        let count = |state: ConnectionState| {
            let all = tunnel.connections.iter();
            number(all.filter(|connection| connection.state == state).count())
        };
        let states = [
            ("connecting", count(ConnectionState::Connecting)),
            ("connected", count(ConnectionState::Connected)),
            ("waiting", count(ConnectionState::Waiting)),
            ("draining", count(ConnectionState::Draining)),
        ];
        let help = "Connections to gateways";
        out.gauges("culvert_tunnel_connections", help, "state", states)?;
        let streams = tunnel
            .connections
            .iter()
            .map(|connection| connection.traffic.streams);
        let help = "Streams that are open";
        out.gauge(
            "culvert_tunnel_streams",
            help,
            f64::from(streams.sum::<u32>()),
        )?;
        certificate(&mut out, identity)
    }
}

/// How it is with the API server; nothing where it is no source.
fn api_server(out: &mut Out<'_>, server: Option<&Server>) -> fmt::Result {
    let Some(server) = server else {
        return Ok(());
    };
    let help = "Whether the API server can be asked";
    let is_asked = u32::from(server.trouble.is_none());
    out.gauge("culvert_api_server_up", help, is_asked)?;
    let help =
        "Whether what is served is what was known before this process, the API server being away";
    out.gauge(
        "culvert_source_stale",
        help,
        u32::from(server.stale.is_some()),
    )
}

/// How long certificates last.
fn certificate(out: &mut Out<'_>, state: &State) -> fmt::Result {
    let days = |at: Timestamp| at.duration_since(Timestamp::now()).as_secs_f64() / 86_400.0;
    let known = [("cert", state.expires), ("ca", state.ca_expires)];
    let known = known
        .iter()
        .filter_map(|(file, at)| Some((*file, days((*at)?))));
    let help = "Days until the certificate in use expires";
    out.gauges("culvert_certificate_expiry_days", help, "file", known)?;
    let help = "Whether the files of the certificate can't be used as they are";
    let has_problem = u32::from(state.problem.is_some());
    out.gauge("culvert_certificate_problem", help, has_problem)
}

struct Metrics {
    views: Arc<Views>,
    answers: Answers,
    counted: Counted,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let stats = self.views.stats.borrow().clone();
        let is_ready = u32::from(Readiness::of(&self.views).ready);
        out.gauge(
            "culvert_ready",
            "Whether Services are translated as they should be",
            is_ready,
        )?;
        let help = "Whether the name of this node is that of no Node";
        let is_nameless = ready::nameless(&self.views).is_some();
        out.gauge("culvert_node_missing", help, u32::from(is_nameless))?;
        self.start(&mut out)?;
        let source = (self.views.source)();
        self.reasons(&mut out, &stats, &source)?;
        self.maps(&mut out, &stats)?;
        out.gauge(
            "culvert_services",
            "Services that were read",
            number(stats.services),
        )?;
        let refused = source.problems.iter().filter(|problem| !problem.ignored);
        let objects = refused.count();
        out.gauge(
            "culvert_objects_refused",
            "Objects that were not read",
            number(objects),
        )?;
        let refused = self.views.checks.borrow().refused.len();
        out.gauge(
            "culvert_health_checks_refused",
            "Services whose health check port is not served",
            number(refused),
        )?;
        api_server(&mut out, source.server.as_ref())?;
        let drift = [([("map", "all")], stats.drift)];
        out.counters(
            "culvert_map_drift",
            "Differences between the maps and what was known",
            drift,
        )?;
        let help = "Services that were planned";
        out.total("culvert_planned_services", help, stats.sync.planned)?;
        let delay = stats.last_delay_seconds;
        out.gauge(
            "culvert_program_delay_seconds",
            "From the last change to its last write",
            delay,
        )?;
        self.sockets(&mut out, &stats)?;
        service_ports::encode(&mut out, &self.counted)?;
        self.steering(&mut out, &stats)?;
        self.tunnel(&mut out)?;
        kube_proxy::encode(&mut out, &stats, &self.answers)
    }
}

impl Metrics {
    fn start(&self, out: &mut Out<'_>) -> fmt::Result {
        let StartTimes {
            load,
            read,
            write,
            attach,
        } = *self.views.start.borrow();
        let steps = [
            ("load", load),
            ("read", read),
            ("write", write),
            ("attach", attach),
        ];
        let done = steps
            .into_iter()
            .filter_map(|(step, took)| Some((step, took?)));
        let help = "How long the steps of the start took";
        out.gauges("culvert_start_seconds", help, "step", done)
    }

    fn reasons(&self, out: &mut Out<'_>, stats: &Stats, source: &Report) -> fmt::Result {
        let mut counts: Vec<(Reason, u64)> = (self.views.counters)().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the kernel's counters");
            Vec::new()
        });
        let tunnel = (self.views.tunnel.counts)();
        let checks = self.views.checks.borrow().clone();
        for reason in Reason::ALL
            .into_iter()
            .filter(|reason| !reason.is_of_kernel())
        {
            let of_one = [
                (Reason::ObjectRefused, source.refused_total),
                (Reason::FieldIgnored, source.ignored_total),
                (Reason::SocketEnded, self.views.sockets.borrow().ended),
                (Reason::HealthPortTaken, checks.refused_total),
            ];
            let of_one = of_one.into_iter().find(|(its, _)| *its == reason);
            let of_one = of_one.map_or(0, |(_, total)| total);
            let of_maps = stats.counts.get(reason.label()).copied().unwrap_or(0);
            let of_tunnel = tunnel.get(&reason).copied().unwrap_or(0);
            let count = of_one.saturating_add(of_maps).saturating_add(of_tunnel);
            counts.push((reason, count));
        }
        let labelled = counts
            .iter()
            .map(|(reason, n)| ([("reason", reason.label())], *n));
        out.counters(
            "culvert_reason",
            "How connects, datagrams and objects ended",
            labelled,
        )
    }

    fn maps(&self, out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
        let maps = used(stats).filter_map(|(size, used)| Some((size.array()?.name, size, used)));
        let used = maps.clone().map(|(map, _, used)| (map, number(used)));
        out.gauges("culvert_map_entries", "Entries in use", "map", used)?;
        let sizes = &self.views.setup.maps;
        let room = |size: Size| sizes.get(size.word()).copied().map_or(0.0, f64::from);
        let room = maps.map(|(map, size, _)| (map, room(size)));
        out.gauges(
            "culvert_map_capacity_entries",
            "Entries there is room for",
            "map",
            room,
        )?;
        let refused = stats
            .problems
            .iter()
            .map(|(reason, n)| (reason, number(*n)));
        let help = "Service ports that are not programmed as planned";
        out.gauges("culvert_service_ports_refused", help, "reason", refused)
    }

    fn sockets(&self, out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
        let help = "Open sockets that were sent to a backend";
        let open = (self.views.connections)();
        let open = number(usize::try_from(open).unwrap_or(usize::MAX));
        out.gauge("culvert_open_connections", help, open)?;
        let help = "Indices of backends that are gone, which open connections keep";
        let kept = number(stats.occupied_backends);
        out.gauge("culvert_occupied_backends", help, kept)?;
        let sockets = self.views.sockets.borrow().clone();
        let good = sockets.looks.saturating_sub(sockets.failures);
        let looks = [
            ([("result", "good")], good),
            ([("result", "failed")], sockets.failures),
        ];
        let help = "Looks for sockets of backends that are gone";
        out.counters("culvert_socket_looks", help, looks)?;
        let help = "Sockets of backends that are gone, in pods that the last look did not enter";
        out.gauge("culvert_sockets_left", help, number(sockets.left))
    }

    fn steering(&self, out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
        let steering = &stats.steering;
        let help = "Nodes that are edge nodes";
        out.gauge("culvert_edge_nodes", help, number(steering.edge_nodes))?;
        let help = "Addresses and ports of edge nodes that are steered";
        out.gauge("culvert_steering_entries", help, number(steering.entries))?;
        let help = "Nodes and ports that are not steered as they should be";
        let problems = number(steering.problems.len());
        out.gauge("culvert_steering_problems", help, problems)?;
        let help = "Whether uplinks can't be guarded, or routes to steering prefixes be kept";
        let has_problem = u32::from(self.views.network.borrow().problem.is_some());
        out.gauge("culvert_steering_network_problem", help, has_problem)
    }

    fn tunnel(&self, out: &mut Out<'_>) -> fmt::Result {
        let nodes = (self.views.tunnel.nodes)();
        let connected = nodes.iter().filter(|node| !node.sessions.is_empty());
        let help = "Edge nodes with a session";
        out.gauge("culvert_tunnel_nodes", help, number(connected.count()))?;
        let sessions = || nodes.iter().flat_map(|node: &NodeView| &node.sessions);
        let help = "Sessions of agents";
        out.gauge("culvert_tunnel_sessions", help, number(sessions().count()))?;
        let streams: u32 = sessions().map(|session| session.traffic.streams).sum();
        let help = "Streams that are open";
        out.gauge("culvert_tunnel_streams", help, f64::from(streams))?;
        (self.views.tunnel.identity)().map_or(Ok(()), |state| certificate(out, &state))
    }
}

#[cfg(test)]
mod tests;
