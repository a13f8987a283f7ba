use k8s_openapi::api::core::v1;

use super::address;
use crate::model::{Node, ObjectName};

/// The taint of a node that is about to be removed; load balancers send nothing there any more.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

pub(super) fn read(name: ObjectName, object: v1::Node) -> Node {
    let taints = object.spec.and_then(|spec| spec.taints).unwrap_or_default();
    let is_deleted = object.metadata.deletion_timestamp.is_some();
    let addresses = object
        .status
        .and_then(|status| status.addresses)
        .unwrap_or_default();
    let ips = |is_internal: bool| {
        let of_type = addresses
            .iter()
            .filter(|address| (address.type_ == "InternalIP") == is_internal);
        of_type
            .filter_map(|address| address::ip(&address.address))
            .collect()
    };
    Node {
        name,
        created: object
            .metadata
            .creation_timestamp
            .map(|time| time.0.as_second()),
        labels: object.metadata.labels.unwrap_or_default(),
        internal_ips: ips(true),
        other_ips: ips(false),
        eligible: !is_deleted && taints.iter().all(|taint| taint.key != TO_BE_DELETED),
    }
}
