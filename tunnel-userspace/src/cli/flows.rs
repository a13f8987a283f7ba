//! `culvert flows`: lists the flows of packets that this node translates.

use std::net::IpAddr;

use clap::Args;

use super::{QueryArgs, QueryError, parse, print_response, service_name, table};
use crate::flows::FlowView;

/// The arguments of `culvert flows`.
#[derive(Debug, Args)]
pub struct FlowsArgs {
    /// Show only the flows to this Service, as NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "SERVICE", value_parser = service_name)]
    service: Option<String>,
    /// Show only the flows of the client with this IP address.
    #[arg(long, value_name = "ADDRESS")]
    client: Option<IpAddr>,
    #[command(flatten)]
    query: QueryArgs,
}

pub(super) const COLUMNS: [&str; 8] = [
    "SERVICE", "PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "SEEN AS", "STATE", "IDLE",
];

impl FlowsArgs {
    /// Runs the query, and prints its result.
    pub(super) fn run(&self) -> Result<(), QueryError> {
        let service = self.service.iter().map(|name| format!("service={name}"));
        let client = self.client.iter().map(|ip| format!("client={ip}"));
        let parameters: Vec<_> = service.chain(client).collect();
        let path = format!("/flows?{}", parameters.join("&"));
        let body = self.query.request(&path)?;
        print_response(self.query.output, &body, || {
            Ok(render(&parse::<Vec<FlowView>>(&body)?))
        })
    }
}

fn render(flows: &[FlowView]) -> String {
    let rows: Vec<_> = flows.iter().map(row).collect();
    table::render(&COLUMNS, &rows)
}

fn row(flow: &FlowView) -> Vec<String> {
    vec![
        flow.service.clone(),
        flow.protocol.clone(),
        flow.client.clone(),
        flow.frontend.clone(),
        flow.backend.clone(),
        flow.masquerade
            .clone()
            .unwrap_or_else(|| "the client".to_owned()),
        flow.state.clone(),
        format!("{}s", flow.idle_seconds),
    ]
}
