//! Culvert's own specs. Each is a function; its name in the list is a sentence about the expected
//! behaviour.

mod attached;
mod audit;
mod cut_off;
mod edge;
mod ended;
mod events;
mod rights;
mod rolling;
mod services;

use anyhow::Result;
use tunnel_cluster::{
    ginkgo::{Case, Verdict},
    proxy::Proxy,
};
use tunnel_tests::clock::Instant;

use crate::stage::Stage;

/// The requirements of a spec.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Wants {
    /// Any service proxy.
    AnyProxy,
    /// Culvert.
    Product,
    /// Culvert, and an edge whose network permits only outgoing connections.
    Tunnel,
}

/// A spec.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    wants: Wants,
    body: fn(&Stage<'_>) -> Result<()>,
}

/// All specs, in the order of the run.
pub(crate) const ALL: [Spec; 13] = [
    spec(
        "pods on all nodes resolve names over UDP and TCP and reach the API server",
        Wants::AnyProxy,
        services::names_resolve,
    ),
    spec(
        "a Service answers pods and hosts of all nodes over IPv4 and IPv6 from all its backends",
        Wants::AnyProxy,
        services::all_backends_answer,
    ),
    spec(
        "a Service without endpoints refuses",
        Wants::AnyProxy,
        services::no_endpoints_refuse,
    ),
    spec(
        "a Service of UDP and TCP on one port answers both",
        Wants::AnyProxy,
        services::two_protocols_on_one_port,
    ),
    spec(
        "rolling a Deployment loses no connection",
        Wants::AnyProxy,
        rolling::loses_no_connection,
    ),
    spec(
        "the programs of each node are attached to its own control group",
        Wants::Product,
        attached::to_their_own_group,
    ),
    spec(
        "an Event on a Service reports what is wrong with it, once for all nodes",
        Wants::Product,
        events::tell_what_is_wrong,
    ),
    spec(
        "a connected UDP socket is ended with its Service, in pods and on hosts",
        Wants::Product,
        ended::with_their_backend,
    ),
    spec(
        "exec reaches a pod on an edge that takes no connections",
        Wants::Tunnel,
        edge::exec,
    ),
    spec(
        "logs -f follows a pod on an edge that takes no connections",
        Wants::Tunnel,
        edge::logs,
    ),
    spec(
        "port-forward reaches a pod on an edge that takes no connections",
        Wants::Tunnel,
        edge::port_forward,
    ),
    spec(
        "a minute without the API server, and a restart meanwhile, fail no connection",
        Wants::Product,
        cut_off::serves_on,
    ),
    spec(
        "service accounts have the rights that are used, and no other",
        Wants::Product,
        rights::are_what_is_used,
    ),
];

const fn spec(name: &'static str, wants: Wants, body: fn(&Stage<'_>) -> Result<()>) -> Spec {
    Spec { name, wants, body }
}

/// Runs a spec, and prints and returns its result.
pub(crate) fn run(spec: &Spec, stage: &Stage<'_>) -> Result<Case> {
    let start = Instant::now();
    let has_product = matches!(stage.cluster.proxy, Proxy::Culvert(_));
    let outcome = match spec.wants {
        Wants::Product | Wants::Tunnel if !has_product => None,
        Wants::Tunnel => {
            stage.cluster.site.network.set_outbound_only(true)?;
            let outcome = (spec.body)(stage);
            stage.cluster.site.network.set_outbound_only(false)?;
            Some(outcome)
        }
        Wants::AnyProxy | Wants::Product => Some((spec.body)(stage)),
    };
    let (verdict, message) = match outcome {
        None => (Verdict::Skipped, String::new()),
        Some(Ok(())) => (Verdict::Passed, String::new()),
        Some(Err(error)) => (Verdict::Failed, format!("{error:#}")),
    };
    let case = Case::new(spec.name, verdict, start.elapsed(), message);
    println!("{case}");
    Ok(case)
}
