//! Where objects come from. Each source writes the whole set that it was told of into its overlay
//! of the store, and the owner of the maps takes what changed from there.

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

/// What a source has read, for status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Objects in use, by kind.
    pub objects: BTreeMap<Kind, usize>,
    /// What was refused, left out, or can't be read any more, as it stands now.
    pub problems: Vec<Problem>,
    /// How much was refused since the start.
    pub refused_total: u64,
    /// How many fields were left out of objects that are used, since the start.
    #[serde(default)]
    pub ignored_total: u64,
    /// Kinds that were met and left alone.
    pub unknown_kinds: Vec<UnknownKind>,
    /// Whether the first whole set has been read.
    pub synced: bool,
    /// The API server, where it is a source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<Server>,
}

/// How it is with the API server.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Server {
    /// The address that is asked now.
    pub address: String,
    /// Why it can't be asked, if it can't.
    pub trouble: Option<String>,
    /// Since when, RFC 3339.
    pub trouble_since: Option<String>,
    /// What is used in place of its answers, at a start without it.
    pub stale: Option<String>,
}

impl Report {
    /// What several sources have read, as one.
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
            merged.refused_total += report.refused_total;
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
