//! Where objects come from. A source keeps the whole set that it was told of, and tells the
//! control loop what changed.

pub mod file;
mod problem;
mod store;

use std::collections::BTreeMap;

pub use problem::{Problem, UnknownKind};
use serde::{Deserialize, Serialize};
pub use store::Store;

use crate::model::Kind;

/// What a source has read, for status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Objects in use, by kind.
    pub objects: BTreeMap<Kind, usize>,
    /// What was refused, or can't be read any more, as it stands now.
    pub problems: Vec<Problem>,
    /// How many problems there ever were.
    pub refused_total: u64,
    /// Kinds that were met and left alone.
    pub unknown_kinds: Vec<UnknownKind>,
    /// Whether the first whole set has been read.
    pub synced: bool,
}
