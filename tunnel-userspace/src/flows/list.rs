//! Lists flows.

use std::{net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use tunnel_common::{
    addr::Address,
    flow::{Endpoint, Flow, Role},
};

use super::{Activity, FlowMap, entry_of};
use crate::reconcile::{PortNames, ReadError};

/// A flow, as `culvert flows` shows it.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowView {
    /// The service port, its id if the service port is not programmed any more, or `tunnel` for the tunnel's ingress.
    pub service: String,
    /// The transport protocol.
    pub protocol: String,
    /// The client.
    pub client: String,
    /// The address and port that the client has dialled.
    pub frontend: String,
    /// The backend.
    pub backend: String,
    /// The node's address and port that stand for the client, if packets have left to a backend on another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<String>,
    /// The phase of the flow, such as `established`.
    pub state: String,
    /// The number of seconds since the last packet.
    pub idle_seconds: u32,
}

/// The flows to list.
#[derive(Clone, Debug, Default)]
pub struct FlowFilter {
    /// Lists only the flows of this client.
    pub client: Option<Address>,
    /// Lists only the flows of the Service with this name, which has the form `name` or `namespace/name`.
    pub service: Option<String>,
}

/// Returns the flows that match a filter, which are read while the list is read. `now` is the time of the monotonic clock in
/// seconds.
pub fn list<M: FlowMap>(
    map: Arc<M>,
    filter: FlowFilter,
    names: PortNames,
    now: u32,
) -> impl Iterator<Item = Result<FlowView, ReadError>> + Send {
    let is_wanted = move |flow: &Flow, names: &PortNames| {
        let is_client = filter
            .client
            .is_none_or(|client| client == flow.client.address);
        let service = filter.service.is_none() || names.contains(flow.service);
        flow.role == Role::DIALLED && flow.flags & Flow::ENDED == 0 && is_client && service
    };
    super::entries(Arc::clone(&map)).filter_map(move |flow| match flow {
        Ok(flow) => is_wanted(&flow, &names).then(|| view(&*map, &flow, &names, now)),
        Err(error) => Some(Err(error)),
    })
}

fn view<M: FlowMap>(
    map: &M,
    flow: &Flow,
    names: &PortNames,
    now: u32,
) -> Result<FlowView, ReadError> {
    let forwarded = entry_of(map, flow, Role::FORWARDED)?;
    let Activity { seen, last_used } = Activity::of(flow, forwarded.as_ref());
    let masquerade = forwarded.map(|forwarded| forwarded.masquerade);
    let masquerade = masquerade.filter(|endpoint| !endpoint.is(&Endpoint::NONE));
    Ok(FlowView {
        service: if flow.service == Flow::NO_SERVICE {
            "tunnel".to_owned()
        } else {
            names.name(flow.service)
        },
        protocol: flow.protocol.to_string(),
        client: text(flow.client),
        frontend: text(flow.frontend),
        backend: text(flow.backend),
        masquerade: masquerade.map(text),
        state: seen.phase(flow.protocol).label().to_owned(),
        idle_seconds: now.saturating_sub(last_used),
    })
}

fn text(endpoint: Endpoint) -> String {
    SocketAddr::new(endpoint.address.to_ip(), endpoint.port.to_host()).to_string()
}

#[cfg(test)]
mod tests;
