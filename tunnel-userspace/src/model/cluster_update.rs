use std::{sync::Arc, time::Duration};

use super::{ConfigMap, EndpointSlice, Node, ObjectName, Pod, Service, ServiceCidr};

/// The objects that have changed in the sources since the last update. `None` stands for a deleted
/// object.
#[derive(Clone, Debug, Default)]
pub struct ClusterUpdate {
    /// The Services that have changed, or whose endpoints have changed. Each appears once, with all its
    /// EndpointSlices.
    pub services: Vec<(ObjectName, Option<ServiceState>)>,
    /// The Nodes that have changed.
    pub nodes: Vec<(ObjectName, Option<Arc<Node>>)>,
    /// The ServiceCIDRs that have changed.
    pub service_cidrs: Vec<(ObjectName, Option<Arc<ServiceCidr>>)>,
    /// The ConfigMaps that have changed.
    pub config_maps: Vec<(ObjectName, Option<Arc<ConfigMap>>)>,
    /// The Pods that have changed.
    pub pods: Vec<(ObjectName, Option<Arc<Pod>>)>,
    /// True if every source has delivered its first complete list. No BPF maps are written before that.
    pub synced: bool,
    /// True if all objects and files in the sources could be used. Otherwise, an object was rejected or a
    /// file could not be read, so map entries left by an earlier process must be kept.
    pub complete: bool,
    /// True if a Node that the sources don't have does not exist, as far as the sources know: as in
    /// [`NodeList::is_current`](crate::model::NodeList::is_current).
    pub nodes_current: bool,
    /// True if a source has not responded since the daemon started, and its last known state is used instead.
    pub stale: bool,
    /// The monotonic time at which the oldest change was noticed.
    pub noticed_at: Duration,
}

/// A Service and its EndpointSlices.
#[derive(Clone, Debug)]
pub struct ServiceState {
    /// The Service.
    pub service: Arc<Service>,
    /// The Service's EndpointSlices, sorted by name.
    pub slices: Vec<Arc<EndpointSlice>>,
}
