//! Reads objects from their sources: files and the API server. Each source writes its objects to its own
//! overlay in the store, and the control loop takes the changes from the store.

pub mod file;
mod fingerprint;
pub mod kube;
mod problem;
mod problem_log;
mod store;

use std::{collections::BTreeMap, sync::Arc};

pub use problem::{Problem, UnknownKind};
use serde::{Deserialize, Serialize};
pub use store::{Overlay, Store};

use crate::model::Kind;

/// The state of a source, as shown in the daemon's status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceReport {
    /// The objects in use, counted by kind.
    pub objects: BTreeMap<Kind, usize>,
    /// The current problems: rejected objects, ignored fields and unreadable files.
    pub problems: Vec<Problem>,
    /// The number of objects rejected since the daemon started.
    pub rejected_total: u64,
    /// The number of fields ignored in otherwise valid objects since the daemon started.
    #[serde(default)]
    pub ignored_total: u64,
    /// Unsupported kinds that were found in files.
    pub unknown_kinds: Vec<UnknownKind>,
    /// True once the first complete list has been read.
    pub synced: bool,
    /// The state of the API server, if it is one of the sources.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerStatus>,
}

/// The state of the API server.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerStatus {
    /// The address of the API server in use.
    pub address: String,
    /// The current error; `None` unless requests are failing.
    pub error: Option<String>,
    /// The time at which requests started to fail, in RFC 3339 format.
    pub error_since: Option<String>,
    /// A description of the data in use, if the server has not responded since the daemon started.
    pub stale: Option<String>,
}

impl SourceReport {
    /// Merges the reports of several sources into one.
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
