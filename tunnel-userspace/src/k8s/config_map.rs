use std::sync::Arc;

use k8s_openapi::api::core::v1;

use super::{Arriving, Invalid};
use crate::model::{ConfigMap, Kind, Object, ObjectName};

impl Arriving for v1::ConfigMap {
    const READ_AS: Kind = Kind::ConfigMap;

    fn read(self, name: ObjectName, _: &mut Vec<Invalid>) -> Result<Option<Object>, Invalid> {
        let data = self.data.unwrap_or_default();
        Ok(Some(Object::ConfigMap(Arc::new(ConfigMap { name, data }))))
    }
}
