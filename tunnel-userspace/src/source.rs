//! The sources of objects. Each source writes its complete set of objects into its overlay of the store;
//! the owner of the maps takes the changes from there.

pub mod file;
mod fingerprint;
mod journal;
pub mod kube;
mod problem;
mod store;

use std::{collections::BTreeMap, sync::Arc};

pub use problem::{Problem, UnknownKind};
use serde::{Deserialize, Serialize};
pub use store::{Overlay, Store};

use crate::model::Kind;

/// The result of reading a source, for status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Objects in use, by kind.
    pub objects: BTreeMap<Kind, usize>,
    /// The current problems: refused objects, ignored fields, unreadable files.
    pub problems: Vec<Problem>,
    /// The number of refused objects since the start.
    pub rejected_total: u64,
    /// The number of ignored fields of objects in use, since the start.
    #[serde(default)]
    pub ignored_total: u64,
    /// Kinds that were found and left alone.
    pub unknown_kinds: Vec<UnknownKind>,
    /// True if the first complete set has been read.
    pub synced: bool,
    /// The state of the API server, if it is a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<Server>,
}

/// The state of the API server.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Server {
    /// The address of the server in use.
    pub address: String,
    /// The error if requests fail.
    pub error: Option<String>,
    /// The time of the first failure, RFC 3339.
    pub error_since: Option<String>,
    /// A description of the data in use, after a start without the server.
    pub stale: Option<String>,
}

impl Report {
    /// Merges the reports of several sources.
    #[must_use]
    pub fn merge(reports: impl IntoIterator<Item = Arc<Self>>) -> Self {
        let mut merged = Self {
            synced: true,
            ..Self::default()
        };
        for report in reports {
            for (kind, count) in &report.objects {
                let total = merged.objects.entry(*kind).or_default();
                *total += *count;
            }
            merged.problems.extend_from_slice(&report.problems);
            merged.rejected_total += report.rejected_total;
            merged.ignored_total += report.ignored_total;
            merged
                .unknown_kinds
                .extend_from_slice(&report.unknown_kinds);
            merged.synced &= report.synced;
            merged.server = merged.server.take().or_else(|| report.server.clone());
        }
        merged
    }
}

#[cfg(test)]
mod tests;
