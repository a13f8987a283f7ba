//! The HTTP paths that `culvert controller` serves.

use std::fmt;

use hyper::{Response, StatusCode};
use tokio::sync::watch;

use super::{
    http_server::{ResponseBody, Routes, text},
    metrics,
    readiness::Readiness,
};
use crate::{controller::ControllerState, identity::DenyListReceiver, listen::UnboundPorts};

/// The state of `culvert controller`, as published by its modules.
#[derive(Clone, Debug)]
pub struct ControllerViews {
    /// The state of requests and of the CA.
    pub state: watch::Receiver<ControllerState>,
    /// The deny list, if there is one.
    pub deny_list: Option<DenyListReceiver>,
    /// The ports that are not bound yet, each with the error from the last attempt.
    pub unbound_ports: UnboundPorts,
}

impl ControllerViews {
    fn readiness(&self) -> Readiness {
        let state = self.state.borrow().clone();
        let unfollowed = state.unfollowed.iter();
        let unfollowed = unfollowed.map(|(signer, problem)| format!("{signer}: {problem}"));
        let mut reasons: Vec<String> = unfollowed.collect();
        reasons.extend(state.ca_problem);
        if state.deny_list_missing {
            reasons.push("no request is handled before controller.denyFile is valid".to_owned());
        }
        if let Some(list) = &self.deny_list {
            reasons.extend(list.state().problem);
        }
        Readiness::from_reasons(reasons, &self.unbound_ports.borrow())
    }

    /// Renders the metrics as text.
    fn metrics(&self) -> Result<String, fmt::Error> {
        let is_ready = self.readiness().ready;
        metrics::render_controller(self.state.borrow().clone(), is_ready)
    }
}

impl Routes for ControllerViews {
    async fn respond(&self, path: &str, _query: &str) -> Option<Response<ResponseBody>> {
        Some(match path {
            "/metrics" => metrics::response(self.metrics()),
            // Liveness: the process responds.
            "/healthz" => text(StatusCode::OK, "ok\n".to_owned()),
            "/readyz" => match self.readiness().summary() {
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                None => text(StatusCode::OK, "ok\n".to_owned()),
            },
            _ => return None,
        })
    }
}
