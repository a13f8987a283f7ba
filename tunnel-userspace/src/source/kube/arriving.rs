//! Objects of the API server for the client: read to the end as they come off the wire, so that what
//! nobody needs is never kept, and one that can't be read doesn't stop the others.

use std::{borrow::Cow, fmt, marker::PhantomData};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::value::RawValue;

use crate::k8s::{self, Arrived, Arriving};

/// What came of an object of one kind.
pub(super) struct Incoming<K> {
    /// With nothing but the version, which the client follows.
    meta: ObjectMeta,
    pub(super) arrived: Arrived,
    kind: PhantomData<fn() -> K>,
}

impl<K> fmt::Debug for Incoming<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.arrived.fmt(f)
    }
}

impl<K> Clone for Incoming<K> {
    fn clone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            arrived: self.arrived.clone(),
            kind: PhantomData,
        }
    }
}

impl<'de, K: Arriving> Deserialize<'de> for Incoming<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        let arrived = k8s::arrived::<K>(raw.get()).map_err(D::Error::custom)?;
        Ok(Self {
            meta: ObjectMeta {
                resource_version: Some(arrived.version.clone()),
                ..ObjectMeta::default()
            },
            arrived,
            kind: PhantomData,
        })
    }
}

impl<K: Resource<DynamicType = ()>> Resource for Incoming<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}
