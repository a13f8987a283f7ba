use std::sync::Arc;

use tunnel_common::reason::Reason;

use super::{Kind, ObjectId, ObjectName};

/// A problem that an operator must act on.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Concern {
    /// The object to which the Event is attached.
    pub about: ObjectId,
    /// The UID of the object, if known.
    pub uid: Option<Arc<str>>,
    /// The reason.
    pub reason: Reason,
    /// The description, for operators.
    pub note: String,
}

impl Concern {
    /// Returns a concern about a Node.
    #[must_use]
    pub fn of_node(name: &str, reason: Reason, note: String) -> Self {
        Self {
            about: ObjectId::new(Kind::Node, ObjectName::new("", name)),
            uid: None,
            reason,
            note,
        }
    }
}
