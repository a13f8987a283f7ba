//! The Nodes to which the indices in quarantine belonged.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tunnel_common::{reason::Reason, steering::SteeringRecord};

use crate::{model::ObjectName, plan::SteeringProblem};

/// The Node that last had each index in quarantine. After a restart, it is unknown for earlier indices, which then count
/// for no Node.
#[derive(Debug, Default)]
pub(super) struct QuarantinedNodes(BTreeMap<u32, Arc<str>>);

impl QuarantinedNodes {
    /// Records the Node whose index is removed.
    pub(super) fn add(&mut self, index: u32, node: Arc<str>) {
        self.0.insert(index, node);
    }

    /// Returns how many indices each Node has in quarantine, which began after `quarantine_start`.
    pub(super) fn counts(
        &mut self,
        records: &BTreeMap<u32, SteeringRecord>,
        quarantine_start: u64,
    ) -> BTreeMap<Arc<str>, usize> {
        self.0.retain(|index, _| {
            let record = records.get(index);
            record.is_some_and(|record| record.removed_at > quarantine_start)
        });
        let mut counts = BTreeMap::new();
        for node in self.0.values() {
            *counts.entry(Arc::clone(node)).or_default() += 1;
        }
        counts
    }
}

/// Returns a problem for each Node that has to wait for an index.
pub(super) fn problems(waiting: &BTreeSet<Arc<str>>) -> impl Iterator<Item = SteeringProblem> {
    waiting.iter().map(|node| SteeringProblem {
        reason: Reason::NodeRejected,
        node: Some(ObjectName::new("", Arc::clone(node))),
        object: format!("Node {node}: status.addresses"),
        text: "changed so often that more indices wait for reuse than are free; new addresses are not steered until \
               indices have waited for ten minutes"
            .to_owned(),
    })
}
