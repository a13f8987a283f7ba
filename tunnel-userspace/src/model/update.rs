use std::{sync::Arc, time::Duration};

use super::{ConfigMap, EndpointSlice, Node, ObjectName, Service};

/// The changes that the sources publish to the control loop, with everything that planning needs.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// The present state of the Services that changed, or whose endpoints did, each once.
    pub services: Vec<(ObjectName, Option<ServiceState>)>,
    /// The present state of the Nodes that changed.
    pub nodes: Vec<(ObjectName, Option<Arc<Node>>)>,
    /// The present state of the ConfigMaps that changed.
    pub config_maps: Vec<(ObjectName, Option<Arc<ConfigMap>>)>,
    /// True if every source has delivered its first complete list. Nothing is programmed before.
    pub synced: bool,
    /// True if the sources hold every object they were sent. If an object was refused or a file can't be
    /// read, entries of an earlier process must not count as deleted.
    pub whole: bool,
    /// True if a source has not answered since the start, and the last known state is used.
    pub stale: bool,
    /// The time at which the oldest change was noticed, on the monotonic clock.
    pub since: Duration,
}

/// A Service and the EndpointSlices that belong to it.
#[derive(Clone, Debug)]
pub struct ServiceState {
    /// The Service.
    pub service: Arc<Service>,
    /// The slices, by name.
    pub slices: Vec<Arc<EndpointSlice>>,
}
