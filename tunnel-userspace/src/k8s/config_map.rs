use std::sync::Arc;

use k8s_openapi::api::core::v1;

use super::{ApiObject, FieldError};
use crate::model::{ConfigMap, Kind, Object, ObjectName};

impl ApiObject for v1::ConfigMap {
    const MODEL_KIND: Kind = Kind::ConfigMap;

    fn into_model(
        self,
        name: ObjectName,
        _: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let data = self.data.unwrap_or_default();
        Ok(Some(Object::ConfigMap(Arc::new(ConfigMap { name, data }))))
    }
}
