//! Metrics for each Service port, from the kernel programs' counters.

use std::fmt;

use super::encoder::{MetricsEncoder, number};
use crate::reconcile::{PortCounterList, PortCounters};

pub(super) fn encode(out: &mut MetricsEncoder<'_>, counted: &PortCounterList) -> fmt::Result {
    let each = |of: fn(&PortCounters) -> u64| {
        let ports = counted.ports.iter();
        ports.map(move |port| (labels(port), of(port)))
    };
    let help = "Connections and UDP flows to a backend of a service port";
    out.counters("culvert_service_connections", help, each(|port| port.sent))?;
    let help = "Refused connections and datagrams to a service port";
    out.counters("culvert_service_refused", help, each(|port| port.refused))?;
    let help = "Open sockets connected to a backend of a service port";
    let open = each(|port| port.open).map(|(labels, open)| (labels, number(open)));
    out.gauges("culvert_service_open_connections", help, open)?;
    let help = "Service ports beyond admin.serviceMetricsLimit";
    let left_out = number(counted.omitted);
    out.gauge("culvert_service_ports_without_metrics", help, left_out)
}

fn labels(port: &PortCounters) -> [(&str, String); 5] {
    let name = &port.name;
    [
        ("namespace", name.service.namespace.to_string()),
        ("service", name.service.name.to_string()),
        ("port", name.port.to_string()),
        ("protocol", name.protocol.to_string()),
        ("ip_family", name.family.label().to_owned()),
    ]
}
