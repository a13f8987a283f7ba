//! The last known state on disk, for a start while the API server can't be reached.

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader, BufWriter, Write as _},
    path::Path,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::model::Object;

/// The version of the file format: raised when older files become unreadable. Fields that an older file
/// lacks have their defaults.
const VERSION: u32 = 1;

/// The maximum size of the file: a hundred times the size for 10,000 Services.
const MOST_BYTES: u64 = 2 << 30;

/// The known objects, with the time of the write.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Snapshot {
    pub(super) written: Timestamp,
    pub(super) objects: Vec<Object>,
}

/// The first line of the file. Each further line is an object.
#[derive(Debug, Deserialize, Serialize)]
struct Head {
    version: u32,
    node: String,
    written: Timestamp,
    objects: usize,
}

/// The error of a file that can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SnapshotError {
    #[error("cannot read it")]
    Read(#[from] io::Error),
    #[error("line {line} makes no sense")]
    Line {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("it has {0} bytes")]
    TooLarge(u64),
    #[error("it is of version {0}")]
    Version(u32),
    #[error("it is of node {0}")]
    Node(String),
    #[error("it has {found} objects of {expected}")]
    Torn { found: usize, expected: usize },
}

/// Writes the state atomically, by a rename.
pub(super) fn write(path: &Path, node: &str, snapshot: &Snapshot) -> io::Result<()> {
    let draft = path.with_extension("new");
    let mut file = BufWriter::new(File::create(&draft)?);
    let head = Head {
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
    // Synced to disk before the rename, since an edge node may lose power at any moment.
    file.into_inner()?.sync_all()?;
    fs::rename(&draft, path)?;
    path.parent()
        .map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

/// Reads the last known state; `None` if nothing was ever written.
pub(super) fn read(path: &Path, node: &str) -> Result<Option<Snapshot>, SnapshotError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let length = file.metadata()?.len();
    if length > MOST_BYTES {
        return Err(SnapshotError::TooLarge(length));
    }
    let mut lines = BufReader::new(file).lines().zip(1..);
    let Some((head, _)) = lines.next() else {
        return Err(SnapshotError::Torn {
            found: 0,
            expected: 0,
        });
    };
    let wrong = |line| move |source| SnapshotError::Line { line, source };
    let head: Head = serde_json::from_str(&head?).map_err(wrong(1))?;
    if head.version != VERSION {
        return Err(SnapshotError::Version(head.version));
    }
    if head.node != node {
        return Err(SnapshotError::Node(head.node));
    }
    let objects = lines
        .map(|(text, line)| serde_json::from_str(&text?).map_err(wrong(line)))
        .collect::<Result<Vec<Object>, _>>()?;
    if objects.len() != head.objects {
        return Err(SnapshotError::Torn {
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
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("objects");

        assert!(read(&path, "node-a").unwrap().is_none());
        write(&path, "node-a", &snapshot()).unwrap();

        assert_eq!(read(&path, "node-a").unwrap(), Some(snapshot()));
    }

    #[test]
    fn a_state_that_is_torn_or_of_another_node_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("objects");
        write(&path, "node-a", &snapshot()).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        let (rest, _) = whole.trim_end().rsplit_once('\n').unwrap();

        for (node, text, wanted) in [
            ("node-b", &*whole, "it is of node node-a"),
            ("node-a", &format!("{rest}\n"), "it has 1 objects of 2"),
            ("node-a", &format!("{rest}\n{{\n"), "line 3 makes no sense"),
            ("node-a", "", "it has 0 objects of 0"),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(read(&path, node).unwrap_err().to_string(), wanted);
        }
    }
}
