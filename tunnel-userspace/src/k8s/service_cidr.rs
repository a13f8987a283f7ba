use std::sync::Arc;

use k8s_openapi::api::networking::v1;

use super::{Arriving, Invalid, Reason, address};
use crate::model::{Kind, Object, ObjectName, ServiceCidr};

impl Arriving for v1::ServiceCIDR {
    const READ_AS: Kind = Kind::ServiceCidr;

    fn read(self, name: ObjectName, _: &mut Vec<Invalid>) -> Result<Option<Object>, Invalid> {
        let ranges = self.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
        let read = |(i, text): (usize, &String)| {
            let refused = || {
                Invalid::new(
                    format!("spec.cidrs[{i}]"),
                    Reason::not(address::A_CIDR, text),
                )
            };
            address::cidr(text).ok_or_else(refused)
        };
        let cidrs = ranges
            .iter()
            .enumerate()
            .map(read)
            .collect::<Result<_, _>>()?;
        Ok(Some(Object::ServiceCidr(Arc::new(ServiceCidr {
            name,
            cidrs,
        }))))
    }
}
