use k8s_openapi::api::core::v1;

use crate::model::{ConfigMap, ObjectName};

pub(super) fn read(name: ObjectName, object: v1::ConfigMap) -> ConfigMap {
    ConfigMap {
        name,
        data: object.data.unwrap_or_default(),
    }
}
