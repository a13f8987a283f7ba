//! A map's type, sizes and flags, as listed in the table or as reported by the kernel.

use std::fmt;

use tunnel_common::table::Map;

/// A map's type, key size, value size and flags. The number of entries is not included, since it depends on
/// the config.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct MapSpec {
    /// The type, `BPF_MAP_TYPE_…`.
    pub(super) kind: u32,
    /// The size of a key in bytes.
    pub(super) key: u32,
    /// The size of a value in bytes.
    pub(super) value: u32,
    /// The flags, `BPF_F_…`.
    pub(super) flags: u32,
}

impl MapSpec {
    /// Returns the type, sizes and flags that the table lists for a map.
    pub(super) const fn from_table(map: &Map) -> Self {
        Self {
            kind: map.kind.number(),
            key: map.key,
            value: map.value,
            flags: map.flags,
        }
    }
}

impl fmt::Display for MapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a map of type {} with keys of {} and values of {} bytes, flags {:#x}",
            self.kind, self.key, self.value, self.flags
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use aya_obj::{Object, ProgramSection};
    use tunnel_common::{
        LAYOUT_VERSION,
        table::{Entries, MAPS, MapType, PROGRAMS, ProgramType},
    };

    use super::*;
    use crate::bpf::{data_path, kernel_log};

    const DOCUMENT: &str = include_str!("../../../docs/maps.md");

    fn objects() -> [Object; 2] {
        [data_path::OBJECT, kernel_log::OBJECT]
            .map(|bytes| Object::parse(bytes).expect("an object"))
    }

    #[test]
    fn the_objects_declare_the_maps_of_the_table_and_no_others() {
        let wanted: BTreeMap<_, _> = MAPS
            .iter()
            .map(|map| (map.name, MapSpec::from_table(map)))
            .collect();
        for object in objects() {
            let maps = object.maps.iter();
            let found: BTreeMap<_, _> = maps
                // Excludes constants, and the ring buffer for the event log.
                .filter(|(name, _)| !name.starts_with('.') && *name != "AYA_LOGS")
                .map(|(name, map)| {
                    let shape = MapSpec {
                        kind: map.map_type(),
                        key: map.key_size(),
                        value: map.value_size(),
                        flags: map.map_flags(),
                    };
                    (name.as_str(), shape)
                })
                .collect();
            assert_eq!(found, wanted);
        }
    }

    #[test]
    fn the_objects_have_the_programs_of_the_table_and_no_others() {
        let wanted: BTreeMap<_, _> = PROGRAMS.iter().map(|row| (row.name, row.kind)).collect();
        for object in objects() {
            let programs = object.programs.iter().map(|(name, program)| {
                let section = &program.section;
                let kind = if matches!(section, ProgramSection::CgroupSockAddr { .. }) {
                    ProgramType::SocketAddress
                } else if matches!(section, ProgramSection::CgroupSock { .. }) {
                    ProgramType::Socket
                } else {
                    let is_classifier = matches!(section, ProgramSection::SchedClassifier);
                    assert!(is_classifier, "{section:?}");
                    ProgramType::Classifier
                };
                (name.as_str(), kind)
            });
            assert_eq!(programs.collect::<BTreeMap<_, _>>(), wanted);
        }
    }

    #[test]
    fn the_document_has_the_type_size_and_migration_of_every_map() {
        assert!(DOCUMENT.contains(&format!("Layout {LAYOUT_VERSION}.")));
        let rows = DOCUMENT.lines().filter(|line| line.starts_with("| `"));
        let rows = rows.map(|row| Vec::from_iter(row.split('|').map(str::trim)));
        let (map_rows, conversions): (Vec<_>, Vec<_>) = rows.partition(|row| row.len() > 5);
        let names: Vec<_> = map_rows
            .iter()
            .map(|row| row[1].trim_matches('`'))
            .collect();
        let known: BTreeSet<_> = MAPS.iter().map(|map| map.name).collect();
        assert_eq!(names.iter().copied().collect::<BTreeSet<_>>(), known);
        assert_eq!(names.len(), MAPS.len(), "{names:?}");
        for row in map_rows {
            let map = Map::named(row[1].trim_matches('`')).expect("a map");
            let kind = match map.kind {
                MapType::Hash => "hash",
                MapType::Array => "array",
                MapType::PerCpuArray => "per-CPU array",
                MapType::LruHash => "LRU hash",
                MapType::SocketStorage => "socket storage",
            };
            assert!(row[2].starts_with(kind), "{row:?}");
            let size = match map.entries {
                Entries::BySize(size, _) => format!("bpf.maps.{}", size.key()),
                Entries::PerCpu(each) => format!("{each} per CPU"),
                Entries::Fixed(0) => "one per socket".to_owned(),
                Entries::Fixed(number) => number.to_string(),
            };
            assert!(row[7].contains(&size), "{row:?}: no {size}");
        }
        for map in MAPS {
            let name = format!("`{}`", map.name);
            let row = conversions.iter().find(|row| row[1].contains(&name));
            let row = row.unwrap_or_else(|| panic!("no row about the migration of {name}"));
            let lasts = row[3].starts_with("as ") || row[3].contains("the same");
            assert_eq!(lasts, map.is_lasting, "{row:?}");
        }
    }
}
