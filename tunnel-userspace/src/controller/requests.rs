//! Handles one request for a certificate: approves or denies it, and signs what is approved.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    ByteString,
    api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition},
    apimachinery::pkg::apis::meta::v1::Time,
};
use tracing::{info, warn};

use super::{
    ca_keeper::{self, CaKeeperError},
    ca_state::CaSettings,
    cluster::{Cluster, ClusterError, NodeEvent},
    table::{Asked, Candidate, Denial, Denied, Rules},
};
use crate::identity::{DenyList, Role, ca::CaError};

/// The types of conditions (Kubernetes `staging/src/k8s.io/api/certificates/v1/types.go`).
const APPROVED: &str = "Approved";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";

/// The outcome of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// It got its certificate from this controller.
    Issued(Role),
    /// This controller denied it.
    Denied(Role, Denial),
    /// There is nothing to do: it is done already, it belongs to another signer, or another controller was faster.
    Nothing,
}

/// The error for a request that could not be handled, and is handled again later.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// The CA can't be used.
    #[error("cannot sign: {0}")]
    Ca(#[from] CaKeeperError),
    /// A certificate could not be created.
    #[error("cannot sign")]
    Sign(#[from] CaError),
    /// A read or write failed.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// Returns the role for which a signer issues certificates.
#[must_use]
pub fn role_of(signer: &str) -> Option<Role> {
    let roles = [Role::Agent, Role::Gateway];
    roles.into_iter().find(|role| role.signer() == signer)
}

/// The settings for handling requests.
#[derive(Clone, Debug)]
pub struct RequestSettings {
    /// The rules.
    pub rules: Rules,
    /// The settings for the CA.
    pub ca: CaSettings,
}

/// Handles a request.
///
/// # Errors
///
/// Returns an error if the API server or the CA can't be used. Conflicts are no errors: another controller has done the same.
pub async fn handle<C: Cluster>(
    cluster: &C,
    settings: &RequestSettings,
    deny_list: &DenyList,
    request: CertificateSigningRequest,
) -> Result<Outcome, HandleError> {
    let Some(role) = role_of(&request.spec.signer_name) else {
        return Ok(Outcome::Nothing);
    };
    if is_done(&request) {
        return Ok(Outcome::Nothing);
    }
    let handled = match check(cluster, &settings.rules, deny_list, role, &request).await? {
        Ok(candidate) => issue(cluster, settings, role, &candidate, request).await,
        Err(denied) => deny(cluster, role, &denied, request).await,
    };
    match handled {
        // The watch delivers the request as it is now.
        Err(HandleError::Cluster(ClusterError::Conflict)) => Ok(Outcome::Nothing),
        other => other,
    }
}

/// Returns true if nothing more will happen to a request.
pub(super) fn is_done(request: &CertificateSigningRequest) -> bool {
    let status = request.status.as_ref();
    status.is_some_and(|status| status.certificate.is_some())
        || has_condition(request, DENIED)
        || has_condition(request, FAILED)
}

fn has_condition(request: &CertificateSigningRequest, wanted: &str) -> bool {
    let conditions = request.status.iter().flat_map(|it| &it.conditions);
    let mut conditions = conditions.flatten();
    conditions.any(|condition| condition.type_ == wanted && condition.status == "True")
}

async fn check<C: Cluster>(
    cluster: &C,
    rules: &Rules,
    deny_list: &DenyList,
    role: Role,
    request: &CertificateSigningRequest,
) -> Result<Result<Candidate, Denied>, ClusterError> {
    let spec = &request.spec;
    let extra: BTreeMap<_, _> = spec.extra.clone().unwrap_or_default();
    let asked = Asked {
        role,
        request: &spec.request.0,
        usages: spec.usages.as_deref().unwrap_or_default(),
        user: spec.username.as_deref().unwrap_or_default(),
        groups: spec.groups.as_deref().unwrap_or_default(),
        extra: &extra,
        expiration_seconds: spec.expiration_seconds.map(i64::from),
    };
    let candidate = match rules.check(&asked) {
        Ok(candidate) => candidate,
        Err(denied) => return Ok(Err(denied)),
    };
    let node = cluster.node(&candidate.node).await?;
    let is_listed = deny_list.contains_node(&candidate.node);
    let checked = rules.check_node(&candidate, node.as_ref(), is_listed);
    Ok(checked.map(|()| candidate))
}

/// Approves and signs a request that meets all rules.
async fn issue<C: Cluster>(
    cluster: &C,
    settings: &RequestSettings,
    role: Role,
    candidate: &Candidate,
    mut request: CertificateSigningRequest,
) -> Result<Outcome, HandleError> {
    // If nothing can be signed, the request stays as it is, and is handled again.
    let authority = ca_keeper::keep(cluster, &settings.ca).await?;
    if !has_condition(&request, APPROVED) {
        let message = format!(
            "the request meets the rules for the {role} of Node {}",
            candidate.node
        );
        add_condition(&mut request, (APPROVED, "RulesMet", message), cluster.now());
        request = cluster.replace_approval(request).await?;
    }
    let now = cluster.now();
    let life = SignedDuration::from_secs(candidate.life).min(settings.ca.life);
    let until = now.checked_add(life).unwrap_or(Timestamp::MAX);
    let certificate =
        authority.certify(&candidate.public_key, role, &candidate.node, (now, until))?;
    let status = request.status.get_or_insert_default();
    status.certificate = Some(ByteString(certificate.into_bytes()));
    cluster.replace_status(request).await?;
    info!(node = candidate.node, %role, %until, "a certificate was issued");
    Ok(Outcome::Issued(role))
}

/// Denies a request. One that somebody else has approved can't be denied any more, and fails.
async fn deny<C: Cluster>(
    cluster: &C,
    role: Role,
    denied: &Denied,
    mut request: CertificateSigningRequest,
) -> Result<Outcome, HandleError> {
    let name = request.metadata.name.clone().unwrap_or_default();
    let (reason, message) = (denied.denial.reason(), &denied.message);
    let is_approved = has_condition(&request, APPROVED);
    let condition = if is_approved { FAILED } else { DENIED };
    let condition = (condition, reason, message.clone());
    add_condition(&mut request, condition, cluster.now());
    if is_approved {
        cluster.replace_status(request).await?;
    } else {
        cluster.replace_approval(request).await?;
    }
    warn!(request = name, %role, reason, message, "a request for a certificate was denied");
    if let Some(node) = &denied.node {
        let event = NodeEvent {
            node: node.clone(),
            reason: "CertificateDenied",
            message: format!(
                "the request {name} for the certificate of {} was denied ({reason}): {message}",
                role.with_article()
            ),
            subject: format!("{role} {reason}"),
        };
        // The request says the same, so it is not denied again if only the Event is missing.
        let reported = cluster.report(event).await;
        if let Err(error) = reported
            && !matches!(error, ClusterError::Conflict)
        {
            warn!(%error, node, "an Event about a denied request could not be created");
        }
    }
    Ok(Outcome::Denied(role, denied.denial))
}

fn add_condition(
    request: &mut CertificateSigningRequest,
    (type_, reason, message): (&str, &str, String),
    now: Timestamp,
) {
    let status = request.status.get_or_insert_default();
    let conditions = status.conditions.get_or_insert_default();
    conditions.push(CertificateSigningRequestCondition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    });
}

#[cfg(test)]
pub(super) mod tests;
