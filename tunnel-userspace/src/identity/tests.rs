//! What the tests of this module share: a CA in a folder, and what it issued.

mod handshake;
mod set;

use std::{fs, path::PathBuf, sync::Arc};

use jiff::{SignedDuration, Timestamp};
use tempfile::TempDir;

use super::{Files, Identity, Rejected, Role, ca, files::Contents};

pub(crate) struct Site {
    pub(super) dir: TempDir,
    pub(super) now: Timestamp,
}

impl Site {
    /// A CA that was made then.
    pub(super) fn at(now: Timestamp) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        ca::init(dir.path(), ca::CA_DAYS, now).expect("a CA");
        Self { dir, now }
    }

    pub(crate) fn new() -> Self {
        Self::at(Timestamp::now())
    }

    pub(crate) fn gateway(&self) -> Files {
        ca::issue_gateway(self.dir.path(), None, ca::DAYS, self.now)
            .expect("a gateway's")
            .files
    }

    pub(crate) fn agent(&self, node: &str) -> Files {
        ca::issue_agent(self.dir.path(), node, None, ca::DAYS, self.now)
            .expect("an agent's")
            .files
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

pub(super) fn verified(files: &Files, role: Role, now: Timestamp) -> Result<Identity, Rejected> {
    let contents = Contents::read(files)?;
    Identity::verified(files, &contents, role, now)
}

pub(super) fn identity(files: &Files, role: Role, now: Timestamp) -> Arc<Identity> {
    Arc::new(verified(files, role, now).expect("a good set"))
}

/// What a bad set is refused with; without the folder's name.
pub(super) fn refusal(files: &Files, role: Role, now: Timestamp) -> String {
    let refused = verified(files, role, now).expect_err("a bad set");
    let folder = files.cert.parent().expect("a folder");
    refused
        .to_string()
        .replace(&format!("{}/", folder.display()), "")
}

pub(super) const fn days(days: i64) -> SignedDuration {
    SignedDuration::from_hours(24 * days)
}

pub(super) fn then() -> Timestamp {
    "2026-03-01T12:00:00Z".parse().expect("a time")
}

#[track_caller]
pub(super) fn assert_has(text: &str, part: &str) {
    assert!(text.contains(part), "{text}");
}

/// Puts the content of one file where another is.
pub(super) fn copy(from: &PathBuf, to: &PathBuf) {
    fs::copy(from, to).expect("copied");
}
