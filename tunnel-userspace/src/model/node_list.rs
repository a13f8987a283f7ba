use std::{collections::BTreeSet, sync::Arc};

/// The names of all Nodes that the sources have.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeList {
    /// The names.
    pub names: Arc<BTreeSet<Arc<str>>>,
    /// True if a Node that is not on the list does not exist, as far as the sources know: each source has delivered
    /// a complete list, no Node in it is invalid, and no source has failed since then.
    pub is_current: bool,
}
