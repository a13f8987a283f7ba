use k8s_openapi::api::networking::v1;

use super::{Invalid, Reason, address};
use crate::model::{ObjectName, ServiceCidr};

pub(super) fn read(name: ObjectName, object: v1::ServiceCIDR) -> Result<ServiceCidr, Invalid> {
    let ranges = object.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
    let cidrs = ranges
        .iter()
        .enumerate()
        .map(|(i, text)| {
            address::cidr(text).ok_or_else(|| {
                Invalid::new(format!("spec.cidrs[{i}]"), Reason::Cidr(text.to_owned()))
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(ServiceCidr { name, cidrs })
}
