use std::sync::Arc;

use tunnel_common::reason::Reason;

use super::ObjectId;

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
