//! Lists and watches the requests of the controller's signers, and calls a function with each that may need something.

use std::time::Duration;

use futures_util::{StreamExt as _, pin_mut};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::{
    api::{ListParams, WatchEvent, WatchParams},
    core::Status,
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::warn;

use super::{
    received::{Received, Requests},
    run::ControllerState,
};
use crate::{drain, error_chain::chain};

/// The number of requests in a page of a list. The API server accepts requests of up to a megabyte.
const PAGE: u32 = 20;
/// The longest duration of a watch, in seconds. All requests are listed again after it, so nothing stays forgotten.
const WATCH_SECONDS: u32 = 280;
/// The time beyond that after which a watch is ended at this end: the server, or a proxy in front of it, must have lost it.
const WATCH_OVERTIME: Duration = Duration::from_secs(30);
/// The delays after a failure.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(30);

/// The error with which a watch ends early.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error(transparent)]
    Request(#[from] kube::Error),
    #[error("the watch has failed: {0}")]
    Status(Box<Status>),
}

/// Follows the requests of a signer until the drain begins. The state says why they can't be followed.
pub(super) async fn follow(
    api: Requests,
    signer: &'static str,
    handle: impl Fn(CertificateSigningRequest, bool) + Send + Sync,
    state: &watch::Sender<ControllerState>,
    mut draining: watch::Receiver<bool>,
) {
    let fields = format!("spec.signerName={signer}");
    let is_listed = || {
        state.send_if_modified(|state| state.unfollowed.remove(signer).is_some());
    };
    let mut delay = FIRST_DELAY;
    loop {
        let ended = tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            ended = list_and_watch(&api, &fields, &handle, is_listed) => ended,
        };
        match ended {
            Ok(()) => delay = FIRST_DELAY,
            // The version was too old.
            Err(WatchError::Status(status)) if status.code == 410 => {}
            Err(error) => {
                let problem = chain(&error);
                warn!(
                    problem,
                    signer, "cannot follow the requests for certificates"
                );
                state.send_modify(|state| {
                    state.unfollowed.insert(signer, problem);
                });
            }
        }
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            () = sleep(delay.mul_f64(0.5 + 0.5 * fastrand::f64())) => {}
        }
        delay = (delay * 2).min(MAX_DELAY);
    }
}

async fn list_and_watch(
    api: &Requests,
    fields: &str,
    handle: &(impl Fn(CertificateSigningRequest, bool) + Send + Sync),
    is_listed: impl Fn() + Send,
) -> Result<(), WatchError> {
    let handle = |Received(received), is_deleted| match received {
        Ok(request) => handle(request, is_deleted),
        Err(error) => warn!(%error, "a request is ignored"),
    };
    let mut params = ListParams::default().fields(fields).limit(PAGE);
    let version = loop {
        let page = api.list(&params).await?;
        let items = page.items.into_iter();
        items.for_each(|request| handle(request, false));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => break page.metadata.resource_version.unwrap_or_default(),
        }
    };
    is_listed();
    let params = WatchParams::default().fields(fields).timeout(WATCH_SECONDS);
    let watching = async {
        let events = api.watch(&params, &version).await?;
        pin_mut!(events);
        while let Some(event) = events.next().await {
            match event? {
                WatchEvent::Added(request) | WatchEvent::Modified(request) => {
                    handle(request, false);
                }
                WatchEvent::Deleted(request) => handle(request, true),
                WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(status) => return Err(WatchError::Status(status)),
            }
        }
        Ok(())
    };
    // All requests are listed again after it.
    let limit = Duration::from_secs(WATCH_SECONDS.into()) + WATCH_OVERTIME;
    timeout(limit, watching).await.unwrap_or(Ok(()))
}
