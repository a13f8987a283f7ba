//! Services that `openyurt.io/topologyKeys` restricts to endpoints on this node or in its node pool (OpenYurt
//! `pkg/yurthub/filter/servicetopology/filter.go`).

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use crate::model::{
    Endpoint, EndpointScope, EndpointSlice, NODE_POOL_LABEL, Node, ObjectName, Service,
    ServiceState, TopologyKeys,
};

/// The pools that Nodes are in, and the Services that are restricted to this node's pool. Empty if the config
/// ignores topology keys.
#[derive(Debug)]
pub struct NodePools {
    rule: TopologyKeys,
    /// This node's name.
    own_name: Arc<str>,
    /// The pool that each Node is in, except for Nodes that are in none.
    pools: HashMap<Arc<str>, Arc<str>>,
    /// The Services that are restricted to this node's pool.
    pool_services: BTreeSet<ObjectName>,
    /// True if a Node has joined or left this node's pool since the last call to
    /// [`Self::take_changed_services`].
    has_changed: bool,
}

impl NodePools {
    /// Creates an instance with no Nodes.
    #[must_use]
    pub fn new(rule: TopologyKeys, own_name: Arc<str>) -> Self {
        Self {
            rule,
            own_name,
            pools: HashMap::new(),
            pool_services: BTreeSet::new(),
            has_changed: false,
        }
    }

    /// Applies the new state of a Node. If this node's own object is deleted, this node keeps its last pool.
    pub fn set_node(&mut self, name: &ObjectName, node: Option<&Node>) {
        let is_own = name.name == self.own_name;
        if !self.is_enabled() || is_own && node.is_none() {
            return;
        }
        let pool = node.and_then(|node| node.labels.get(NODE_POOL_LABEL));
        let pool = pool.filter(|pool| !pool.is_empty());
        let old = match pool {
            Some(pool) => {
                let pool = Arc::from(pool.as_str());
                self.pools.insert(Arc::clone(&name.name), pool)
            }
            None => self.pools.remove(&name.name),
        };
        let new = self.pools.get(&name.name);
        let is_own_pool = |pool: Option<&Arc<str>>| pool.is_some() && pool == self.own_pool();
        self.has_changed |=
            old.as_ref() != new && (is_own || is_own_pool(old.as_ref()) || is_own_pool(new));
    }

    /// Applies the new state of a Service.
    pub fn set_service(&mut self, name: &ObjectName, service: Option<&Service>) {
        match service.and_then(|service| self.restriction(service)) {
            Some(EndpointScope::Pool) => self.pool_services.insert(name.clone()),
            Some(EndpointScope::Node) | None => self.pool_services.remove(name),
        };
    }

    /// Returns the Services that must be planned again because the Nodes in this node's pool have changed
    /// since the last call.
    pub fn take_changed_services(&mut self) -> BTreeSet<ObjectName> {
        let changed = std::mem::take(&mut self.has_changed).then(|| self.pool_services.clone());
        changed.unwrap_or_default()
    }

    /// Returns a Service with only the endpoints that its restriction permits. An endpoint without a node is
    /// in no pool.
    #[must_use]
    pub fn restrict<'a>(&self, state: &'a ServiceState) -> Cow<'a, ServiceState> {
        let Some(keep_to) = self.restriction(&state.service) else {
            return Cow::Borrowed(state);
        };
        let own_pool = self.own_pool().filter(|_| keep_to == EndpointScope::Pool);
        // If this node is in no pool, only endpoints on this node are permitted.
        let is_permitted = |endpoint: &Endpoint| match (&endpoint.node, own_pool) {
            (Some(node), Some(own_pool)) => self.pools.get(node) == Some(own_pool),
            (Some(node), None) => *node == self.own_name,
            (None, _) => false,
        };
        let slices = state.slices.iter();
        Cow::Owned(ServiceState {
            service: Arc::clone(&state.service),
            slices: slices
                .map(|slice| retain_endpoints(slice, is_permitted))
                .collect(),
        })
    }

    /// Returns a Service's restriction, unless the config ignores restrictions.
    fn restriction(&self, service: &Service) -> Option<EndpointScope> {
        service.endpoint_scope.filter(|_| self.is_enabled())
    }

    /// Returns this node's pool.
    fn own_pool(&self) -> Option<&Arc<str>> {
        self.pools.get(&self.own_name)
    }

    const fn is_enabled(&self) -> bool {
        matches!(self.rule, TopologyKeys::Honor)
    }
}

/// Returns the slice with only the wanted endpoints; it may end up with none.
fn retain_endpoints(
    slice: &Arc<EndpointSlice>,
    wanted: impl Fn(&Endpoint) -> bool,
) -> Arc<EndpointSlice> {
    if slice.endpoints.iter().all(&wanted) {
        return Arc::clone(slice);
    }
    let mut slice = EndpointSlice::clone(slice);
    slice.endpoints.retain(wanted);
    Arc::new(slice)
}

#[cfg(test)]
mod tests;
