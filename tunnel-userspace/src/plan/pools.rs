//! Which endpoints Services keep to: those of this node, or of its node pool
//! (openyurt `pkg/yurthub/filter/servicetopology/filter.go`).

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use crate::model::{
    Endpoint, EndpointSlice, KeepTo, NODE_POOL, Node, ObjectName, Service, ServiceState,
    TopologyKeys,
};

/// Which Nodes are in which node pool, and which Services it matters to. Nothing is kept where it
/// doesn't count which endpoints Services keep to.
#[derive(Debug)]
pub struct Pools {
    rule: TopologyKeys,
    /// The name of this node.
    node: Arc<str>,
    /// The pool of each Node that is in one.
    pools: HashMap<Arc<str>, Arc<str>>,
    /// The Services that keep to a pool.
    keeping: BTreeSet<ObjectName>,
    /// Whether other Nodes are in this node's pool than at the last look.
    is_new: bool,
}

impl Pools {
    /// Nothing is known yet of the Nodes around this one.
    #[must_use]
    pub fn new(rule: TopologyKeys, node: Arc<str>) -> Self {
        Self {
            rule,
            node,
            pools: HashMap::new(),
            keeping: BTreeSet::new(),
            is_new: false,
        }
    }

    /// Takes a Node as it is now. While there is none for this node, what it said holds.
    pub fn set_node(&mut self, name: &ObjectName, node: Option<&Node>) {
        let is_own = name.name == self.node;
        if !self.counts() || is_own && node.is_none() {
            return;
        }
        let pool = node.and_then(|node| node.labels.get(NODE_POOL));
        let pool = pool.filter(|pool| !pool.is_empty());
        let old = match pool {
            Some(pool) => {
                let pool = Arc::from(pool.as_str());
                self.pools.insert(Arc::clone(&name.name), pool)
            }
            None => self.pools.remove(&name.name),
        };
        let new = self.pools.get(&name.name);
        let is_near = |pool: Option<&Arc<str>>| pool.is_some() && pool == self.own();
        self.is_new |= old.as_ref() != new && (is_own || is_near(old.as_ref()) || is_near(new));
    }

    /// Takes a Service as it is now.
    pub fn set_service(&mut self, name: &ObjectName, service: Option<&Service>) {
        match service.and_then(|service| self.of(service)) {
            Some(KeepTo::Pool) => self.keeping.insert(name.clone()),
            Some(KeepTo::Node) | None => self.keeping.remove(name),
        };
    }

    /// The Services that may keep to other endpoints than at the last look.
    pub fn take_moved(&mut self) -> BTreeSet<ObjectName> {
        let moved = std::mem::take(&mut self.is_new).then(|| self.keeping.clone());
        moved.unwrap_or_default()
    }

    /// A Service with those of its endpoints that it keeps to. An endpoint of no known node is of no
    /// pool.
    #[must_use]
    pub fn near<'a>(&self, state: &'a ServiceState) -> Cow<'a, ServiceState> {
        let Some(keep_to) = self.of(&state.service) else {
            return Cow::Borrowed(state);
        };
        let own = self.own().filter(|_| keep_to == KeepTo::Pool);
        // Without a pool there is this node alone.
        let is_near = |endpoint: &Endpoint| match (&endpoint.node, own) {
            (Some(node), Some(own)) => self.pools.get(node) == Some(own),
            (Some(node), None) => *node == self.node,
            (None, _) => false,
        };
        let slices = state.slices.iter();
        Cow::Owned(ServiceState {
            service: Arc::clone(&state.service),
            slices: slices.map(|slice| only(slice, is_near)).collect(),
        })
    }

    /// Which endpoints a Service keeps to, where that counts.
    fn of(&self, service: &Service) -> Option<KeepTo> {
        service.keep_to.filter(|_| self.counts())
    }

    /// The pool of this node.
    fn own(&self) -> Option<&Arc<str>> {
        self.pools.get(&self.node)
    }

    const fn counts(&self) -> bool {
        matches!(self.rule, TopologyKeys::Honour)
    }
}

/// A slice with some of its endpoints. It stays though none is left.
fn only(slice: &Arc<EndpointSlice>, wanted: impl Fn(&Endpoint) -> bool) -> Arc<EndpointSlice> {
    if slice.endpoints.iter().all(&wanted) {
        return Arc::clone(slice);
    }
    let mut slice = EndpointSlice::clone(slice);
    slice.endpoints.retain(wanted);
    Arc::new(slice)
}

#[cfg(test)]
mod tests;
