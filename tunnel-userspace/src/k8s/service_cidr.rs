use std::sync::Arc;

use k8s_openapi::api::networking::v1;

use super::{ApiObject, FieldError, FieldErrorKind, address};
use crate::model::{Kind, Object, ObjectName, ServiceCidr};

impl ApiObject for v1::ServiceCIDR {
    const MODEL_KIND: Kind = Kind::ServiceCidr;

    fn into_model(
        self,
        name: ObjectName,
        _: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let ranges = self.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
        let read = |(i, text): (usize, &String)| {
            let refused = || {
                FieldError::new(
                    format!("spec.cidrs[{i}]"),
                    FieldErrorKind::wrong_form(address::CIDR_FORM, text),
                )
            };
            address::parse_cidr(text).ok_or_else(refused)
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
