use std::{sync::Arc, time::Duration};

use super::{ConfigMap, EndpointSlice, Node, ObjectName, Service};

/// What a source tells the control loop: everything that planning needs of what changed.
#[derive(Clone, Debug, Default)]
pub struct Update {
    /// The Services that changed, or whose endpoints did, each once, as they stand now.
    pub services: Vec<(ObjectName, Option<ServiceState>)>,
    /// The Nodes that changed, as they stand now.
    pub nodes: Vec<(ObjectName, Option<Arc<Node>>)>,
    /// The ConfigMaps that changed, as they stand now.
    pub config_maps: Vec<(ObjectName, Option<Arc<ConfigMap>>)>,
    /// Whether every source has told its first whole list. Nothing is programmed before.
    pub synced: bool,
    /// Whether the sources hold everything they were told. While an object was refused or a file
    /// can't be read, what an earlier process programmed of it must not be taken for deleted.
    pub whole: bool,
    /// Whether a source wasn't heard of since the start, and what an earlier process knew of it is
    /// used.
    pub stale: bool,
    /// When the oldest change in here was noticed, on the monotonic clock.
    pub since: Duration,
}

/// A Service and the EndpointSlices that belong to it.
#[derive(Clone, Debug)]
pub struct ServiceState {
    /// The Service.
    pub service: Arc<Service>,
    /// Its slices, by name.
    pub slices: Vec<Arc<EndpointSlice>>,
}
