use std::sync::Arc;

use tunnel_common::reason::Reason;

use super::{Kind, ObjectId, ObjectName};

/// Something that an operator must act on.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Concern {
    /// The object that shows it to whoever looks there.
    pub about: ObjectId,
    /// Who that object is among all that had its name, where that is known.
    pub uid: Option<Arc<str>>,
    /// Why.
    pub reason: Reason,
    /// What happened, for people.
    pub note: String,
}

impl Concern {
    /// Something about a Node.
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
