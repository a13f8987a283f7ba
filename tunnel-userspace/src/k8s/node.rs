use std::{net::IpAddr, sync::Arc};

use k8s_openapi::api::core::v1;

use super::{ApiObject, FieldError, FieldErrorKind, address};
use crate::model::{Kind, Node, Object, ObjectName};

/// The taint on a node that is about to be removed. Load balancers should send no new traffic to such a node.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

impl ApiObject for v1::Node {
    const MODEL_KIND: Kind = Kind::Node;

    fn into_model(
        self,
        name: ObjectName,
        ignored: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let spec = self.spec.unwrap_or_default();
        let pod_cidrs = pod_cidrs(&spec, ignored);
        let taints = spec.taints.unwrap_or_default();
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
            pod_cidrs,
            eligible: !is_deleted && taints.iter().all(|taint| taint.key != TO_BE_DELETED),
        }))))
    }
}

/// Returns the valid ranges of the pods' addresses. Pushes the errors in the others to `ignored`.
fn pod_cidrs(spec: &v1::NodeSpec, ignored: &mut Vec<FieldError>) -> Vec<(IpAddr, u8)> {
    let several = spec.pod_cidrs.iter().flatten().enumerate();
    let several = several.map(|(i, text)| (format!("spec.podCIDRs[{i}]"), text));
    let mut all: Vec<_> = several.collect();
    // The API server copies the first range to this field.
    if all.is_empty() {
        let single = spec.pod_cidr.iter().filter(|text| !text.is_empty());
        all.extend(single.map(|text| ("spec.podCIDR".to_owned(), text)));
    }
    let mut cidrs = Vec::new();
    for (field, text) in all {
        match address::parse_cidr(text) {
            Some(cidr) => cidrs.push(cidr),
            None => {
                let kind = FieldErrorKind::wrong_form(address::CIDR_FORM, text);
                ignored.push(FieldError::new(field, kind));
            }
        }
    }
    cidrs
}
