use std::sync::Arc;

use k8s_openapi::api::core::v1;

use super::{ApiObject, FieldError, address};
use crate::model::{Kind, Object, ObjectName, Pod};

/// The phases of a Pod whose containers have ended. Its addresses may belong to another Pod already.
const ENDED: [&str; 2] = ["Succeeded", "Failed"];

impl ApiObject for v1::Pod {
    const MODEL_KIND: Kind = Kind::Pod;

    /// Returns `None` for a Pod that has no addresses of its own, or not yet, or no longer.
    fn into_model(
        self,
        name: ObjectName,
        ignored: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let spec = self.spec.unwrap_or_default();
        let status = self.status.unwrap_or_default();
        let has_ended = status.phase.is_some_and(|phase| ENDED.contains(&&*phase));
        let Some(node) = spec.node_name else {
            return Ok(None);
        };
        if spec.host_network == Some(true) || has_ended {
            return Ok(None);
        }
        let ips = status.pod_ips.unwrap_or_default().into_iter().enumerate();
        let parse = |(i, ip): (usize, v1::PodIP)| {
            address::parse_routable(&ip.ip, || format!("status.podIPs[{i}].ip"))
        };
        let ips = super::collect_valid(ips.map(parse), ignored);
        if ips.is_empty() {
            return Ok(None);
        }
        let node = node.into();
        Ok(Some(Object::Pod(Arc::new(Pod { name, node, ips }))))
    }
}
