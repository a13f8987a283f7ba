//! The file that records which edge node holds each address. The maps contain only the addresses.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write as _},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde_json::Value;
use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tracing::warn;

use crate::{drain, plan::AddressHolders};

/// The name of the file in the state directory, and the name under which it is kept if it is damaged.
pub(super) const HELD_ADDRESSES_FILE: &str = "node-addresses.json";
pub(super) const DAMAGED_FILE: &str = "node-addresses.damaged";

/// The minimum interval between two writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// The delay before a failed write is retried.
const RETRY_DELAY: Duration = Duration::from_secs(30);
/// The maximum size of the file, in bytes. An address takes less than 400 bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Returns the path of the file in the state directory.
#[must_use]
pub fn held_addresses_path(state_dir: &Path) -> PathBuf {
    state_dir.join(HELD_ADDRESSES_FILE)
}

/// The content of the file.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct SavedHolders {
    /// The Node that holds each address.
    pub holders: AddressHolders,
    /// A description of what could not be read, if anything. The Nodes that had these addresses no longer hold them.
    pub problem: Option<String>,
}

/// Reads the file. Without a file, no edge node holds an address. If the file is damaged, the readable entries count,
/// and the file is kept under another name.
#[must_use]
pub fn read_held_addresses(path: &Path) -> SavedHolders {
    let saved = match read(path) {
        Ok(entries) => parse(entries),
        Err(error) if error.kind() == io::ErrorKind::NotFound => SavedHolders::default(),
        Err(error) => SavedHolders {
            problem: Some(error.to_string()),
            ..SavedHolders::default()
        },
    };
    if let Some(problem) = &saved.problem {
        let kept = path.with_file_name(DAMAGED_FILE);
        let copied = fs::copy(path, &kept).err();
        let (path, kept) = (path.display(), kept.display());
        warn!(%path, %kept, copy_error = ?copied, problem, "cannot read which edge node had each address first");
    }
    saved
}

fn read(path: &Path) -> io::Result<BTreeMap<String, Value>> {
    let length = fs::metadata(path)?.len();
    if length > MAX_BYTES {
        let error = format!("the file has {length} bytes, more than {MAX_BYTES}");
        return Err(io::Error::other(error));
    }
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

fn parse(entries: BTreeMap<String, Value>) -> SavedHolders {
    let mut saved = SavedHolders::default();
    let mut damaged = Vec::new();
    for (key, value) in entries {
        match (key.parse::<IpAddr>(), value.as_str()) {
            (Ok(address), Some(node)) => {
                saved.holders.insert(address, node.into());
            }
            (Ok(_), None) => damaged.push(format!("{key}: {value} is not the name of a Node")),
            (Err(_), _) => damaged.push(format!("{key:?} is not an IP address")),
        }
    }
    if let Some(first) = damaged.first() {
        let more = damaged.len() - 1;
        saved.problem = Some(match more {
            0 => first.clone(),
            _ => format!("{first}, and {more} more damaged entries"),
        });
    }
    saved
}

/// Writes each change to the file, until the drain begins.
pub async fn save_held_addresses(
    path: PathBuf,
    mut holders: watch::Receiver<Arc<AddressHolders>>,
    mut draining: watch::Receiver<bool>,
) {
    // The last value that was written. When the daemon stops, the sender may be dropped before this task has seen
    // its last value.
    let mut saved: Option<Arc<AddressHolders>> = None;
    let (mut has_failed, mut is_draining) = (false, false);
    while !is_draining {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => is_draining = true,
            changed = holders.changed() => is_draining = changed.is_err(),
        }
        let current = Arc::clone(&holders.borrow_and_update());
        if saved
            .as_ref()
            .is_some_and(|saved| Arc::ptr_eq(saved, &current))
        {
            continue;
        }
        let (to, content) = (path.clone(), Arc::clone(&current));
        let written = spawn_blocking(move || write(&to, &content)).await;
        let error = written.map_err(io::Error::other).flatten().err();
        if let Some(error) = error.as_ref().filter(|_| !has_failed) {
            let path = path.display();
            warn!(%path, %error, "cannot save which edge node had each address first");
        }
        has_failed = error.is_some();
        let pause = if has_failed {
            holders.mark_changed();
            RETRY_DELAY
        } else {
            saved = Some(current);
            WRITE_INTERVAL
        };
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => {}
            () = sleep(pause) => {}
        }
    }
}

/// Writes the file under a temporary name, and then renames it.
fn write(path: &Path, holders: &AddressHolders) -> io::Result<()> {
    let draft = path.with_extension("draft");
    let mut file = File::create(&draft)?;
    file.write_all(&serde_json::to_vec(holders)?)?;
    file.sync_all()?;
    fs::rename(&draft, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture::ip;

    #[tokio::test]
    async fn the_last_change_is_saved_when_the_daemon_stops() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = held_addresses_path(directory.path());
        assert_eq!(read_held_addresses(&path), SavedHolders::default());
        let (holders, receiver) = watch::channel(Arc::default());
        let (drain, draining) = watch::channel(false);
        let changed = AddressHolders::from([(ip("10.1.2.3"), "edge-7".into())]);
        holders.send_replace(Arc::new(changed.clone()));
        drain.send_replace(true);
        drop(holders);

        save_held_addresses(path.clone(), receiver, draining).await;

        let saved = SavedHolders {
            holders: changed,
            problem: None,
        };
        assert_eq!(read_held_addresses(&path), saved);
    }

    #[test]
    fn the_readable_entries_of_a_damaged_file_count_and_the_file_is_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = held_addresses_path(directory.path());
        let text =
            r#"{"10.1.2.3": "edge-7", "10.1.2.300": "edge-8", "10.1.2.4": 5, "fd00::7": "edge-7"}"#;
        fs::write(&path, text).expect("written");

        let saved = read_held_addresses(&path);

        let addresses: Vec<_> = saved.holders.keys().copied().collect();
        assert_eq!(addresses, [ip("10.1.2.3"), ip("fd00::7")]);
        let problem = "\"10.1.2.300\" is not an IP address, and 1 more damaged entries";
        assert_eq!(saved.problem.as_deref(), Some(problem));
        let kept = directory.path().join("node-addresses.damaged");
        assert_eq!(fs::read_to_string(kept).expect("kept"), text);

        fs::write(&path, "{").expect("written");
        let saved = read_held_addresses(&path);
        assert!(saved.holders.is_empty() && saved.problem.is_some());
    }
}
