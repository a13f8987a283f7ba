use std::sync::Arc;

use tunnel_common::reason::Reason;

use super::{Kind, ObjectId, ObjectName};

/// A problem that an operator must fix. It is reported to the API server as an Event of type `Warning`.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ObjectWarning {
    /// The object that the Event is about.
    pub regarding: ObjectId,
    /// The UID of the object, if known.
    pub uid: Option<Arc<str>>,
    /// The reason for the warning. Logs and metrics use the same reasons.
    pub reason: Reason,
    /// A description of the problem for operators.
    pub note: String,
}

impl ObjectWarning {
    /// Creates a warning about a Node.
    #[must_use]
    pub fn for_node(name: &str, reason: Reason, note: String) -> Self {
        Self {
            regarding: ObjectId::new(Kind::Node, ObjectName::new("", name)),
            uid: None,
            reason,
            note,
        }
    }
}
