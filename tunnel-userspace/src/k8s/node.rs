use std::sync::Arc;

use k8s_openapi::api::core::v1;

use super::{ApiObject, FieldError, address};
use crate::model::{Kind, Node, Object, ObjectName};

/// The taint on a node that is about to be removed. Load balancers should send no new traffic to such a node.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

impl ApiObject for v1::Node {
    const MODEL_KIND: Kind = Kind::Node;

    fn into_model(
        self,
        name: ObjectName,
        _: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let taints = self.spec.and_then(|spec| spec.taints).unwrap_or_default();
        let is_deleted = self.metadata.deletion_timestamp.is_some();
        let addresses = self.status.and_then(|status| status.addresses);
        let addresses = addresses.unwrap_or_default();
        let ips = |is_internal: bool| {
            let of_type = addresses
                .iter()
                .filter(|address| (address.type_ == "InternalIP") == is_internal);
            of_type
                .filter_map(|address| address::parse_ip(&address.address))
                .collect()
        };
        Ok(Some(Object::Node(Arc::new(Node {
            name,
            labels: self.metadata.labels.unwrap_or_default(),
            internal_ips: ips(true),
            other_ips: ips(false),
            eligible: !is_deleted && taints.iter().all(|taint| taint.key != TO_BE_DELETED),
        }))))
    }
}
