//! The names of the Nodes in use, which the store publishes.

use std::{collections::BTreeSet, sync::Arc};

use tokio::sync::watch;

use crate::model::NodeList;

/// The names of the Nodes in use, and their receivers.
#[derive(Debug, Default)]
pub(super) struct NodeNames {
    names: BTreeSet<Arc<str>>,
    has_changed: bool,
    list: watch::Sender<NodeList>,
}

impl NodeNames {
    pub(super) fn subscribe(&self) -> watch::Receiver<NodeList> {
        self.list.subscribe()
    }

    /// Adds or removes a name. The change is published later, together with others.
    pub(super) fn set(&mut self, name: &Arc<str>, exists: bool) {
        self.has_changed |= if exists {
            self.names.insert(Arc::clone(name))
        } else {
            self.names.remove(name)
        };
    }

    /// Publishes the names, if they have changed, or if another value of `is_current` applies to them.
    pub(super) fn publish(&mut self, is_current: bool) {
        let has_changed = std::mem::take(&mut self.has_changed);
        self.list.send_if_modified(|list| {
            if !has_changed && list.is_current == is_current {
                return false;
            }
            if has_changed {
                list.names = Arc::new(self.names.clone());
            }
            list.is_current = is_current;
            true
        });
    }
}
