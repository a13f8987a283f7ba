use std::{sync::Arc, time::Duration};

use super::{ConfigMap, EndpointSlice, Node, ObjectName, Service};

/// The objects that have changed in the sources since the last update. `None` stands for a deleted
/// object.
#[derive(Clone, Debug, Default)]
pub struct ClusterUpdate {
    /// Services that changed themselves or in their endpoints, each once, with all their slices.
    pub services: Vec<(ObjectName, Option<ServiceState>)>,
    /// Nodes that changed.
    pub nodes: Vec<(ObjectName, Option<Arc<Node>>)>,
    /// ConfigMaps that changed.
    pub config_maps: Vec<(ObjectName, Option<Arc<ConfigMap>>)>,
    /// True if every source has delivered its first complete list. Maps are not written before that.
    pub synced: bool,
    /// True if the sources hold every object that they were sent. Otherwise an object was refused or a
    /// file can't be read, and map entries of an earlier process must be kept.
    pub complete: bool,
    /// True if a source has not responded since the start, so that its last known state is used.
    pub stale: bool,
    /// The monotonic time when the oldest change was noticed.
    pub noticed_at: Duration,
}

/// A Service with its EndpointSlices.
#[derive(Clone, Debug)]
pub struct ServiceState {
    /// The Service.
    pub service: Arc<Service>,
    /// The slices, sorted by name.
    pub slices: Vec<Arc<EndpointSlice>>,
}
