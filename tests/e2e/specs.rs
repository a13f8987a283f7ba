//! Culvert's own e2e tests. Each test is a function; [`ALL`] lists it with a sentence that states the
//! expected behaviour.

mod api_server_outage;
mod attachment;
mod audit_log;
mod certificate_requests;
mod certificates;
mod connected_udp;
mod controller;
mod edge_commands;
mod events;
mod gateway_restart;
mod permissions;
mod reachability;
mod rolling_update;
mod services;

use anyhow::Result;
use tunnel_cluster::{
    ginkgo::{SpecResult, Verdict},
    proxy::Proxy,
};
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
};

use crate::fixture::Fixture;

/// The kind of cluster that a test requires.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Requirement {
    /// Any service proxy.
    AnyProxy,
    /// Culvert as the service proxy.
    Culvert,
    /// Culvert, and a kernel with BPF iterators over socket storage.
    SocketIterator,
    /// Culvert, and an edge node whose network permits only outgoing connections.
    Tunnel,
}

/// One of Culvert's own e2e tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    requirement: Requirement,
    body: fn(&Fixture<'_>) -> Result<()>,
}

/// All tests, in the order in which they run.
pub(crate) const ALL: [Spec; 21] = [
    spec(
        "pods on all nodes resolve names over UDP and TCP and reach the API server",
        Requirement::AnyProxy,
        services::names_resolve,
    ),
    spec(
        "all backends of a Service respond to pods and hosts on all nodes over IPv4 and IPv6",
        Requirement::AnyProxy,
        services::all_backends_answer,
    ),
    spec(
        "a Service without endpoints refuses connections",
        Requirement::AnyProxy,
        services::no_endpoints_refuse,
    ),
    spec(
        "a Service with UDP and TCP on one port responds to both",
        Requirement::AnyProxy,
        services::two_protocols_on_one_port,
    ),
    spec(
        "clients outside and pods of other nodes reach every address of a Service, as the table says",
        Requirement::AnyProxy,
        reachability::is_as_the_table_says,
    ),
    spec(
        "no connection fails during a rolling update of a Deployment",
        Requirement::AnyProxy,
        rolling_update::loses_no_connection,
    ),
    spec(
        "the programs of each node are attached to its own control group",
        Requirement::Culvert,
        attachment::uses_own_cgroup,
    ),
    spec(
        "one Event of all nodes reports an invalid annotation of a Service",
        Requirement::Culvert,
        events::report_an_invalid_annotation,
    ),
    spec(
        "connected UDP sockets fail at once when their Service is deleted, in pods and on hosts",
        Requirement::SocketIterator,
        connected_udp::is_ended_with_its_service,
    ),
    spec(
        "kubectl exec reaches a pod on an edge node that accepts no connections",
        Requirement::Tunnel,
        edge_commands::exec,
    ),
    spec(
        "kubectl logs -f follows a pod on an edge node that accepts no connections",
        Requirement::Tunnel,
        edge_commands::logs,
    ),
    spec(
        "kubectl port-forward reaches a pod on an edge node that accepts no connections",
        Requirement::Tunnel,
        edge_commands::port_forward,
    ),
    spec(
        "a rollout of the only gateway under an open kubectl exec refuses connects to the edge for at most 2 s",
        Requirement::Tunnel,
        gateway_restart::refuses_connects_briefly,
    ),
    spec(
        "a kubelet cannot give its node the labels that pods of gateways and controllers need",
        Requirement::Culvert,
        certificates::gateways_need_labels_that_a_kubelet_cannot_set,
    ),
    spec(
        "a request that breaks a rule, such as one for another node, is denied, reported on the Node, and counted",
        Requirement::Culvert,
        certificate_requests::are_denied,
    ),
    spec(
        "certificates of 20 s are renewed five times while kubectl exec and kubectl logs -f stay open",
        Requirement::Tunnel,
        certificates::are_renewed_under_open_commands,
    ),
    spec(
        "a minute without controllers and a change of the CA cut no open command",
        Requirement::Tunnel,
        certificates::survive_controllers_and_a_ca,
    ),
    spec(
        "the sessions of a Node that is deleted end after 5 s (missingNodeTimeout)",
        Requirement::Tunnel,
        certificates::end_with_their_node,
    ),
    spec(
        "an edge node that joins gets a certificate and is reached",
        Requirement::Tunnel,
        certificates::are_given_to_a_node_that_joins,
    ),
    spec(
        "no connection fails during a minute without the API server in which the daemons restart",
        Requirement::Culvert,
        api_server_outage::fails_no_connection,
    ),
    spec(
        "service accounts have exactly the permissions that they use",
        Requirement::Culvert,
        permissions::are_all_used,
    ),
];

const fn spec(
    name: &'static str,
    requirement: Requirement,
    body: fn(&Fixture<'_>) -> Result<()>,
) -> Spec {
    Spec {
        name,
        requirement,
        body,
    }
}

/// Runs a test; prints and returns its result.
pub(crate) fn run(spec: &Spec, fixture: &Fixture<'_>) -> Result<SpecResult> {
    let start = Instant::now();
    let has_culvert = matches!(fixture.cluster.proxy, Proxy::Culvert(_));
    let lacking = match spec.requirement {
        Requirement::AnyProxy => None,
        _ if !has_culvert => Some("the proxy is not Culvert".to_owned()),
        Requirement::SocketIterator if !feature::is_supported(Feature::SocketIterator)? => {
            Some(format!("this kernel has no {}", Feature::SocketIterator))
        }
        Requirement::Culvert | Requirement::SocketIterator | Requirement::Tunnel => None,
    };
    let is_tunnel = spec.requirement == Requirement::Tunnel;
    let (verdict, message) = if let Some(lacking) = lacking {
        (Verdict::Skipped, lacking)
    } else {
        let network = &fixture.cluster.shared.network;
        if is_tunnel {
            network.set_outbound_only(true)?;
        }
        let result = (spec.body)(fixture);
        if is_tunnel {
            network.set_outbound_only(false)?;
        }
        match result {
            Ok(()) => (Verdict::Passed, String::new()),
            Err(error) => (Verdict::Failed, format!("{error:#}")),
        }
    };
    let result = SpecResult::new(spec.name, verdict, start.elapsed(), message);
    println!("{result}");
    Ok(result)
}
