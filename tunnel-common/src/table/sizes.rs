//! Map sizes: the numbers in the config, and the resulting number of entries in each map.

use super::{BACKENDS, Entries, FRONTENDS, MAPS, Map, SLOTS, SOURCE_RANGES, STEER, STEERED};

/// Declares the sizes, each with its field, key in `bpf.maps`, variant, group, and default.
macro_rules! sizes {
    ($($(#[$doc:meta])* $field:ident, $key:literal: $name:ident of $group:ident = $default:literal;)+) => {
        /// The capacity of the maps (`bpf.maps` in the config). The arrays are larger, because old and new
        /// entries coexist during a change.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        #[cfg_attr(
            feature = "user",
            derive(schemars::JsonSchema, serde::Deserialize, serde::Serialize),
            serde(default, deny_unknown_fields, rename_all = "camelCase")
        )]
        pub struct MapSizes {
            $($(#[$doc])* pub $field: u32,)+
        }

        /// One of the sizes in the config.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub enum MapSize {
            $($(#[$doc])* $name,)+
        }

        impl MapSize {
            /// All sizes, in the order in which they appear in the config.
            pub const ALL: [Self; [$($default),+].len()] = [$(Self::$name),+];

            /// Returns the size's key in `bpf.maps`.
            #[must_use]
            pub const fn key(self) -> &'static str {
                match self { $(Self::$name => $key,)+ }
            }

            /// Returns the label used in metrics and tables, which is the key in snake case.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$name => stringify!($field),)+ }
            }

            /// Returns the group of maps that is replaced if the size changes.
            #[must_use]
            pub const fn group(self) -> MapGroup {
                match self { $(Self::$name => MapGroup::$group,)+ }
            }
        }

        impl MapSizes {
            /// Returns the value of a size.
            #[must_use]
            pub const fn of(self, size: MapSize) -> u32 {
                match size { $(MapSize::$name => self.$field,)+ }
            }

            /// Returns a copy with a different value for one of the sizes.
            #[must_use]
            pub const fn with(mut self, size: MapSize, number: u32) -> Self {
                match size { $(MapSize::$name => self.$field = number,)+ }
                self
            }
        }

        impl Default for MapSizes {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }
    };
}

sizes! {
    /// Frontends: each translated combination of address, port and protocol counts once.
    frontends, "frontends": Frontends of Services = 32_768;
    /// Slots in backend sets: each endpoint of each Service port counts once.
    slots, "slots": Slots of Services = 131_072;
    /// Backends: each endpoint of each Service port counts once.
    backends, "backends": Backends of Services = 65_536;
    /// Ranges of client addresses that may use a load balancer's address: each range of a Service port counts
    /// once, and adjacent ranges count as one.
    source_ranges, "sourceRanges": SourceRanges of Services = 4096;
    /// Steered ports on edge nodes: each combination of node address and port counts once.
    steering, "steering": Steering of Steering = 16_384;
    /// Clients with session affinity: each client of each Service port counts once.
    affinity, "affinity": Affinity of Affinity = 16_384;
    /// Translations of UDP sockets that use more than about 120 VIPs. Up to that number, a socket's translations
    /// are stored with the socket. When the map is full, further translations are lost and counted.
    shared_translations, "sharedTranslations": SharedTranslations of SharedTranslations = 8192;
    /// Flows of packets that are translated (`service.packets`). A flow takes memory only while it exists: about 500
    /// bytes. If all of them are open connections, new ones are refused and counted.
    flows, "flows": Flows of Flows = 32_768;
    /// Packets that arrive or leave in fragments (`service.packets`). When the map is full, the least recently used entry is
    /// evicted, and the remaining fragments of that packet are lost.
    fragments, "fragments": Fragments of Fragments = 1024;
}

/// A group of maps that refer to each other by index and are therefore replaced together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MapGroup {
    /// The service maps.
    Services,
    /// The steering maps. They have the minimum size unless the config contains `tunnel.steering`.
    Steering,
    /// The session affinity map, which holds the backend that each client keeps.
    Affinity,
    /// The map of the translations for which there is no room in the storage of their sockets.
    SharedTranslations,
    /// The map of flows. It has the minimum size unless `service.packets` is enabled.
    Flows,
    /// The map of fragments. It has the minimum size unless `service.packets` is enabled.
    Fragments,
}

impl MapGroup {
    /// All groups.
    pub const ALL: [Self; 6] = [
        Self::Services,
        Self::Steering,
        Self::Affinity,
        Self::SharedTranslations,
        Self::Flows,
        Self::Fragments,
    ];
}

impl MapSizes {
    /// The size of maps that are not enabled. It can't be set in the config.
    pub const DISABLED: u32 = 0;

    /// Returns sizes that all have the same value.
    #[must_use]
    pub const fn uniform(number: u32) -> Self {
        Self {
            frontends: number,
            slots: number,
            backends: number,
            source_ranges: number,
            steering: number,
            affinity: number,
            shared_translations: number,
            flows: number,
            fragments: number,
        }
    }

    /// Returns each size's key in the config, with its value.
    pub fn by_key(self) -> impl Iterator<Item = (&'static str, u32)> {
        MapSize::ALL
            .into_iter()
            .map(move |size| (size.key(), self.of(size)))
    }

    /// Returns a copy with one group's sizes taken from `other`.
    #[must_use]
    pub fn with_group(self, group: MapGroup, other: Self) -> Self {
        let in_group = MapSize::ALL
            .into_iter()
            .filter(|size| size.group() == group);
        in_group.fold(self, |sizes, size| sizes.with(size, other.of(size)))
    }

    /// Returns a copy with the minimum sizes for a group that is not enabled.
    #[must_use]
    pub fn without(self, group: MapGroup) -> Self {
        self.with_group(group, Self::uniform(Self::DISABLED))
    }

    /// Derives the sizes with which existing maps were created from how many entries each has, as returned by
    /// `entries`. An optional map that is missing counts as not enabled. Returns `None` if another map is missing.
    pub fn of_maps(entries: impl Fn(&Map) -> Option<u32>) -> Option<Self> {
        MapSize::ALL
            .into_iter()
            .try_fold(Self::uniform(0), |sizes, size| {
                let found = MAPS.iter().find_map(|map| match map.entries {
                    Entries::BySize(its, headroom) if its == size => Some((map, headroom)),
                    Entries::BySize(..) | Entries::PerCpu(_) | Entries::Fixed(_) => None,
                });
                let (map, headroom) = found?;
                let its = entries(map).map(|entries| headroom.size_for(entries));
                let its = its.or_else(|| map.is_optional.then_some(Self::DISABLED));
                Some(sizes.with(size, its?))
            })
    }

    /// Returns how many entries the array `frontends` has.
    #[must_use]
    pub const fn frontend_entries(self) -> u32 {
        FRONTENDS.entries(self, 1)
    }

    /// Returns how many addresses may have a value in the map `services`. The rest is for frontends, and one for the probe's.
    #[must_use]
    pub const fn cluster_addresses(self) -> u32 {
        self.frontends.saturating_sub(1)
    }

    /// Returns how many entries the array `steered` has.
    #[must_use]
    pub const fn steered_entries(self) -> u32 {
        STEERED.entries(self, 1)
    }

    /// Returns how many entries the hash `steer` has.
    #[must_use]
    pub const fn steer_entries(self) -> u32 {
        STEER.entries(self, 1)
    }

    /// Returns how many entries the array `slots` has.
    #[must_use]
    pub const fn slot_entries(self) -> u32 {
        SLOTS.entries(self, 1)
    }

    /// Returns how many entries the array `source_ranges` has.
    #[must_use]
    pub const fn source_range_entries(self) -> u32 {
        SOURCE_RANGES.entries(self, 1)
    }

    /// Returns how many entries the array `backends` has.
    #[must_use]
    pub const fn backend_entries(self) -> u32 {
        BACKENDS.entries(self, 1)
    }
}

/// The entries that a map has in addition to its configured size.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Headroom {
    /// No additional entries.
    None,
    /// An eighth of the size plus 64, because old and new entries coexist during a change.
    Update,
    /// One entry, for the daemon's probe.
    Probe,
    /// As many additional entries as the size, because removed indices wait in quarantine before they are
    /// reused, and one more for the probe.
    Quarantine,
    /// As many additional entries as the size, because each translation has two entries, and each frontend may have a cluster
    /// IP of its own.
    Pairs,
    /// Twice as many additional entries as the size, because each flow has up to three entries, and one more, so that a map
    /// that is not used has one.
    Triples,
}

impl Headroom {
    /// Returns how many entries a map of this size has. The size must be one that the config permits or that
    /// an existing map has; with any other size, the calculation may overflow.
    #[must_use]
    pub const fn entries(self, size: u32) -> u32 {
        match self {
            Self::None => size,
            Self::Update => size + size / 8 + 64,
            Self::Probe => size + 1,
            Self::Quarantine => size * 2 + 1,
            Self::Pairs => size * 2,
            Self::Triples => size * 3 + 1,
        }
    }

    /// Returns the size for which a map with this many entries was created, or 0 if it has fewer entries than
    /// any of our maps.
    #[must_use]
    pub const fn size_for(self, entries: u32) -> u32 {
        match self {
            Self::None => entries,
            Self::Update => {
                let without_64 = entries.saturating_sub(64);
                // n + n / 8 = without_64, so n is 8/9 of without_64, rounded up.
                without_64 - without_64 / 9
            }
            Self::Probe => entries.saturating_sub(1),
            Self::Quarantine => entries.saturating_sub(1) / 2,
            Self::Pairs => entries / 2,
            Self::Triples => entries.saturating_sub(1) / 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::SERVICES;

    #[test]
    fn sizes_are_derived_from_the_maps_that_were_created_with_them() {
        let sizes = (1..).step_by(999).zip(MapSize::ALL);
        let sizes = sizes.fold(MapSizes::uniform(0), |sizes, (n, size)| sizes.with(size, n));

        assert_eq!(
            MapSizes::of_maps(|map| Some(map.entries(sizes, 4))),
            Some(sizes)
        );
        for missing in [SERVICES, BACKENDS, STEER] {
            let entries = |map: &Map| (*map != missing).then(|| map.entries(sizes, 4));
            assert_eq!(MapSizes::of_maps(entries), None, "{}", missing.name);
        }
    }

    #[test]
    fn every_size_comes_back_from_its_entries() {
        for headroom in [
            Headroom::None,
            Headroom::Update,
            Headroom::Probe,
            Headroom::Quarantine,
            Headroom::Pairs,
            Headroom::Triples,
        ] {
            for size in (0..200).chain([4096, 65_536, 131_072]) {
                assert_eq!(
                    headroom.size_for(headroom.entries(size)),
                    size,
                    "{headroom:?}"
                );
            }
        }
    }

    #[test]
    fn a_group_that_is_not_enabled_has_the_minimum_size() {
        let sizes = MapSizes::default().without(MapGroup::Steering);

        assert_eq!((sizes.steer_entries(), sizes.steered_entries()), (1, 1));
        assert_eq!(
            sizes.with_group(MapGroup::Steering, MapSizes::default()),
            MapSizes::default()
        );
    }
}
