//! Writes the last known state to disk, and reads it back if the API server can't be reached at startup.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    path::Path,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::Object;

/// The version of the file format. It is incremented when older files can no longer be read. Adding a field
/// that has a default does not require a new version.
const VERSION: u32 = 1;

/// The maximum size of the file, in bytes. This is a hundred times the size needed for 10,000 Services.
const MAX_BYTES: u64 = 2 << 30;

/// The last known objects, and the time at which they were written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Snapshot {
    pub(super) written: Timestamp,
    pub(super) objects: Vec<Object>,
}

/// The first line of the file. Each of the other lines holds one object.
#[derive(Debug, Deserialize, Serialize)]
struct Header {
    version: u32,
    node: String,
    written: Timestamp,
    objects: usize,
}

/// An error that occurred while reading the last known state.
#[derive(Debug, thiserror::Error)]
pub(super) enum SnapshotError {
    #[error("cannot read the file")]
    Read(#[from] io::Error),
    #[error("the file is empty")]
    Empty,
    #[error("line {line} of the file is not valid")]
    Line {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("the file has {0} bytes, more than {max}", max = MAX_BYTES)]
    TooLarge(u64),
    #[error("the file has format version {0}, but this release reads version {known}", known = VERSION)]
    Version(u32),
    #[error("the file belongs to node {found}, not to {expected}")]
    Node { found: String, expected: String },
    #[error("the file has {found} of {expected} objects")]
    Incomplete { found: usize, expected: usize },
}

/// Writes the state to a new file and atomically renames it to `path`.
pub(super) fn write(path: &Path, node: &str, snapshot: &Snapshot) -> io::Result<()> {
    let draft = path.with_extension("new");
    let mut file = BufWriter::new(File::create(&draft)?);
    let head = Header {
        version: VERSION,
        node: node.to_owned(),
        written: snapshot.written,
        objects: snapshot.objects.len(),
    };
    serde_json::to_writer(&mut file, &head)?;
    file.write_all(b"\n")?;
    for object in &snapshot.objects {
        serde_json::to_writer(&mut file, object)?;
        file.write_all(b"\n")?;
    }
    // An edge node may lose power at any moment, so the file is synced to disk before it is renamed.
    file.into_inner()?.sync_all()?;
    fs::rename(&draft, path)?;
    path.parent()
        .map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

/// Reads the last known state. Returns `None` if the file does not exist.
pub(super) fn read(path: &Path, node: &str) -> Result<Option<Snapshot>, SnapshotError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let length = file.metadata()?.len();
    if length > MAX_BYTES {
        return Err(SnapshotError::TooLarge(length));
    }
    let mut lines = BufReader::new(file).lines().zip(1..);
    let Some((head, _)) = lines.next() else {
        return Err(SnapshotError::Empty);
    };
    let wrong = |line| move |source| SnapshotError::Line { line, source };
    let head: Header = serde_json::from_str(&head?).map_err(wrong(1))?;
    if head.version != VERSION {
        return Err(SnapshotError::Version(head.version));
    }
    if head.node != node {
        return Err(SnapshotError::Node {
            found: head.node,
            expected: node.to_owned(),
        });
    }
    let objects = lines
        .map(|(text, line)| serde_json::from_str(&text?).map_err(wrong(line)))
        .collect::<Result<Vec<Object>, _>>()?;
    if objects.len() != head.objects {
        return Err(SnapshotError::Incomplete {
            found: objects.len(),
            expected: head.objects,
        });
    }
    Ok(Some(Snapshot {
        written: head.written,
        objects,
    }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{Endpoint, Family, ObjectName, Service, fixture};

    fn snapshot() -> Snapshot {
        let name = ObjectName::new("shop", "web");
        let service = Service {
            created: Some(7),
            cluster_ips: fixture::ips(&["10.96.0.1", "fd00::1"]),
            ports: vec![fixture::http(53)],
            ..Service::named(name.clone())
        };
        let endpoint = Endpoint {
            ready: false,
            terminating: true,
            node: Some(Arc::from("node-a")),
            ..fixture::endpoint(fixture::ip("10.244.0.2"))
        };
        let ports = [("http", 5353)];
        let slice = fixture::slice("web-1", &name, Family::V4, &ports, vec![endpoint]);
        Snapshot {
            written: Timestamp::from_second(1_800_000_000).unwrap(),
            objects: vec![
                Object::Service(Arc::new(service)),
                Object::EndpointSlice(Arc::new(slice)),
            ],
        }
    }

    #[test]
    fn a_written_state_can_be_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("objects");

        assert!(read(&path, "node-a").unwrap().is_none());
        write(&path, "node-a", &snapshot()).unwrap();

        assert_eq!(read(&path, "node-a").unwrap(), Some(snapshot()));
    }

    #[test]
    fn an_incomplete_state_or_one_of_another_node_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("objects");
        write(&path, "node-a", &snapshot()).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        let (rest, _) = whole.trim_end().rsplit_once('\n').unwrap();

        for (node, text, wanted) in [
            (
                "node-b",
                &*whole,
                "the file belongs to node node-a, not to node-b",
            ),
            (
                "node-a",
                &format!("{rest}\n"),
                "the file has 1 of 2 objects",
            ),
            (
                "node-a",
                &format!("{rest}\n{{\n"),
                "line 3 of the file is not valid",
            ),
            ("node-a", "", "the file is empty"),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(read(&path, node).unwrap_err().to_string(), wanted);
        }
    }
}
