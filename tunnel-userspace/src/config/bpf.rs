//! The `bpf` section.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::table::MapSizes;

use crate::duration;

/// The settings for the kernel programs and their maps.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct BpfConfig {
    /// The cgroup whose sockets are translated; the daemon must run inside it.
    pub cgroup: Cgroup,
    /// The directory for pinned maps and programs, on a BPF file system.
    pub bpffs: PathBuf,
    /// The interval between checks that the programs are attached, in effect and pinned.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub check_interval: Duration,
    /// The interval between test connections, which show whether the programs translate.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub test_connection_interval: Duration,
    /// The capacity of each map, in entries.
    pub maps: MapSizes,
}

impl Default for BpfConfig {
    fn default() -> Self {
        Self {
            cgroup: Cgroup(None),
            bpffs: "/sys/fs/bpf/culvert".into(),
            check_interval: Duration::from_secs(2),
            test_connection_interval: Duration::from_secs(10),
            maps: MapSizes::default(),
        }
    }
}

/// A cgroup's directory. `None`, written as `auto`, stands for the root of the cgroup v2 hierarchy.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(from = "String", into = "String")]
pub struct Cgroup(pub Option<PathBuf>);

impl From<String> for Cgroup {
    fn from(text: String) -> Self {
        Self((text != "auto").then(|| text.into()))
    }
}

impl From<Cgroup> for String {
    fn from(cgroup: Cgroup) -> Self {
        cgroup
            .0
            .map_or_else(|| "auto".to_owned(), |path| path.display().to_string())
    }
}
