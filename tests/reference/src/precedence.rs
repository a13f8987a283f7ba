//! Which of two Services has an address that both claim.

use k8s_openapi::{api::core::v1::Service, jiff::Timestamp};

use super::{Front, Kind};

/// The least one wins: by the kind of address, then the older Service, then by names. The name of
/// the port is last; the API server admits no two ports of a Service that come to it.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Precedence {
    kind: Kind,
    age: Age,
    namespace: String,
    service: String,
    port: String,
}

/// When a Service was made. One that does not say is the youngest.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Age {
    Since(Timestamp),
    Unknown,
}

impl Precedence {
    pub(super) fn of(service: &Service, front: &Front) -> Self {
        let created = service.metadata.creation_timestamp.as_ref();
        Self {
            kind: front.kind,
            age: created.map_or(Age::Unknown, |time| Age::Since(time.0)),
            namespace: front.owner.namespace.clone(),
            service: front.owner.service.clone(),
            port: front.owner.port.clone(),
        }
    }
}
