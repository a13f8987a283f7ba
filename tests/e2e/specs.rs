//! Our own specs. One is a function whose name in the list is a sentence about what holds.

mod edge;
mod rolling;
mod services;

use anyhow::Result;
use tunnel_tests::{
    clock::Instant,
    cluster::{ginkgo::Verdict, proxy::Proxy},
};

use crate::{stage::Stage, table::Row};

/// What a spec is about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Needs {
    /// Whatever serves Services.
    AnyProxy,
    /// The product.
    Culvert,
}

/// A spec.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    needs: Needs,
    body: fn(&Stage<'_>) -> Result<()>,
}

/// All, in the order in which they run.
pub(crate) fn all() -> Vec<Spec> {
    let any = |name, body| Spec {
        name,
        needs: Needs::AnyProxy,
        body,
    };
    let ours = |name, body| Spec {
        name,
        needs: Needs::Culvert,
        body,
    };
    vec![
        any(
            "pods on both nodes resolve names over UDP and TCP and reach the API server",
            services::names_resolve,
        ),
        any(
            "a Service answers pods and hosts of both nodes over IPv4 and IPv6 from all its backends",
            services::all_backends_answer,
        ),
        any(
            "a Service without endpoints refuses",
            services::no_endpoints_refuse,
        ),
        any(
            "a Service of UDP and TCP on one port answers both",
            services::two_protocols_on_one_port,
        ),
        any(
            "rolling a Deployment loses no connection",
            rolling::loses_no_connection,
        ),
        ours(
            "exec reaches a pod on an edge that takes no connections",
            edge::exec,
        ),
        ours(
            "logs -f follows a pod on an edge that takes no connections",
            edge::logs,
        ),
        ours(
            "port-forward reaches a pod on an edge that takes no connections",
            edge::port_forward,
        ),
    ]
}

/// Runs one, and tells of it.
pub(crate) fn run(spec: &Spec, stage: &Stage<'_>) -> Row {
    let start = Instant::now();
    let is_ours = matches!(stage.cluster.proxy(), Proxy::Culvert(_));
    let (verdict, message) = if spec.needs == Needs::Culvert && !is_ours {
        (Verdict::Skipped, String::new())
    } else {
        match (spec.body)(stage) {
            Ok(()) => (Verdict::Passed, String::new()),
            Err(error) => (Verdict::Failed, format!("{error:#}")),
        }
    };
    let row = Row {
        name: spec.name.to_owned(),
        verdict,
        took: start.elapsed(),
        message,
    };
    println!("{row}");
    row
}
