//! The table of all maps and programs, one row each. Loading, pinning, migration and the checks of pins use
//! these rows. A new map needs a row here, the type of its values, a declaration in the object, and code
//! that uses it.

mod sizes;

use core::mem::size_of;

pub use self::sizes::{Part, Rule, Size, Sizes};
use crate::{
    affinity::{Affinity, AffinityKey},
    origin::{Origin, Overflow, OverflowKey},
    reason::Reason,
    service::{Backend, Front, FrontKey, Slot, Source, Tally},
    steering::{Steered, SteeringKey},
};

/// The number of entries of a map.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Entries {
    /// A number that follows from a size in the config.
    Of(Size, Rule),
    /// A number per CPU.
    PerCpu(u32),
    /// A fixed number; 0 if the kernel keeps one entry per socket.
    Fixed(u32),
}

/// The condition under which a start replaces an existing map of the same layout by a new one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Remade {
    /// A size of its group changes.
    With(Part),
    /// A larger map is needed. The values of the old map are then added to the new one.
    Larger,
    /// Never.
    Never,
}

/// The type of a map, with the kernel's number (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Kind {
    /// A hash.
    Hash = 1,
    /// An array.
    Array = 2,
    /// An array with separate values for each CPU.
    PerCpuArray = 6,
    /// A hash that evicts the least recently used entry.
    LruHash = 9,
    /// A value per socket, in the socket's storage.
    SocketStorage = 24,
}

impl Kind {
    /// Returns the kernel's number.
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// A map: a row of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Map {
    /// The name in the object, in the pin path, and in documents.
    pub name: &'static str,
    /// The type of the map.
    pub kind: Kind,
    /// The size of a key in bytes.
    pub key: u32,
    /// The size of a value in bytes.
    pub value: u32,
    /// The flags, `BPF_F_…`.
    pub flags: u32,
    /// The number of entries.
    pub entries: Entries,
    /// The condition for replacing the map.
    pub remade: Remade,
    /// True if a start adopts the map from an older layout, since its values have the same meaning in every
    /// layout. A layout that changes more than reserved fields of the map must set this to false. That is
    /// not allowed for `origin` and `conns`, since they have values of open sockets.
    pub lasts: bool,
}

impl Map {
    const fn new<K, V>(name: &'static str, kind: Kind, entries: Entries) -> Self {
        Self {
            name,
            kind,
            key: bytes::<K>(),
            value: bytes::<V>(),
            flags: 0,
            entries,
            remade: match entries {
                Entries::Of(size, _) => Remade::With(size.part()),
                Entries::PerCpu(_) | Entries::Fixed(_) => Remade::Never,
            },
            lasts: false,
        }
    }

    const fn flagged(self, flags: u32) -> Self {
        Self { flags, ..self }
    }

    const fn remade(self, remade: Remade) -> Self {
        Self { remade, ..self }
    }

    const fn lasting(self) -> Self {
        Self {
            lasts: true,
            ..self
        }
    }

    /// Returns the number of entries for these sizes and this number of CPUs.
    #[must_use]
    pub const fn entries(&self, sizes: Sizes, cpus: u32) -> u32 {
        match self.entries {
            Entries::Of(size, rule) => rule.entries(sizes.of(size)),
            Entries::PerCpu(each) => each * cpus,
            Entries::Fixed(number) => number,
        }
    }

    /// Returns the map of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        MAPS.iter().find(|map| map.name == name)
    }
}

#[expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "keys and values are a few bytes"
)]
const fn bytes<T>() -> u32 {
    size_of::<T>() as u32
}

/// Declares the maps: each is a constant, and all of them are in `MAPS`.
macro_rules! maps {
    ($($(#[$doc:meta])* $constant:ident = $map:expr;)+) => {
        $($(#[$doc])* pub const $constant: Map = $map;)+

        /// All maps, in the order of creation. The sizes of existing maps are derived from the first map
        /// of each size.
        pub const MAPS: &[Map] = &[$($constant),+];
    };
}

/// `BPF_F_NO_PREALLOC`: entries are allocated when they are needed, as socket storage requires.
const NO_PREALLOC: u32 = 1;
/// `BPF_F_NO_COMMON_LRU`: each CPU has its own LRU list.
const NO_COMMON_LRU: u32 = 2;
/// `BPF_F_MMAPABLE`: the daemon maps the values into its memory.
pub const MMAPABLE: u32 = 1 << 10;

maps! {
    /// The index of a frontend's record, by frontend key.
    SERVICES = Map::new::<FrontKey, u32>("services", Kind::Hash, Entries::Of(Size::Frontends, Rule::Exactly));
    /// The records of frontends.
    FRONTENDS = Map::new::<u32, Front>("frontends", Kind::Array, Entries::Of(Size::Frontends, Rule::Spare));
    /// The slots of backend sets.
    SLOTS = Map::new::<u32, Slot>("slots", Kind::Array, Entries::Of(Size::Slots, Rule::Spare));
    /// The source ranges of frontends.
    SOURCE_RANGES = Map::new::<u32, Source>("source_ranges", Kind::Array, Entries::Of(Size::SourceRanges, Rule::Spare));
    /// The backends.
    BACKENDS = Map::new::<u32, Backend>("backends", Kind::Array, Entries::Of(Size::Backends, Rule::Spare));
    /// The number of open connections of each backend.
    CONNS = Map::new::<u32, u64>("conns", Kind::Array, Entries::Of(Size::Backends, Rule::Spare))
        .flagged(MMAPABLE)
        .remade(Remade::Larger)
        .lasting();
    /// The last translation of each socket.
    ORIGIN = Map::new::<u32, Origin>("origin", Kind::SocketStorage, Entries::Fixed(0))
        .flagged(NO_PREALLOC)
        .lasting();
    /// The older translations of unconnected sockets.
    OVERFLOW = Map::new::<OverflowKey, Overflow>("overflow", Kind::LruHash, Entries::PerCpu(1024))
        .flagged(NO_COMMON_LRU)
        .lasting();
    /// The counters by reason.
    REASON_COUNTS = Map::new::<u32, u64>("reason_counts", Kind::PerCpuArray, Entries::Fixed(Reason::CAPACITY));
    /// The counters by service port.
    SERVICE_COUNTS = Map::new::<u32, Tally>("service_counts", Kind::Array, Entries::Of(Size::Frontends, Rule::Spare));
    /// The backends of clients with session affinity.
    AFFINITY = Map::new::<AffinityKey, Affinity>(
        "affinity",
        Kind::LruHash,
        Entries::Of(Size::Affinity, Rule::Exactly),
    );
    /// The index of a steering record, by address and port of an edge node.
    STEER = Map::new::<SteeringKey, u32>("steer", Kind::Hash, Entries::Of(Size::Steering, Rule::Probe))
        .lasting();
    /// The steering records: an address and port of an edge node each.
    STEERED = Map::new::<u32, Steered>("steered", Kind::Array, Entries::Of(Size::Steering, Rule::Resting))
        .lasting();
    /// The cookie of the host's network namespace, and the address families with a route to the ingress.
    HOST = Map::new::<u32, u64>("host", Kind::Array, Entries::Fixed(2)).lasting();
}

const _: () = assert!(ORIGIN.lasts && CONNS.lasts);

/// The type of a program, with the kernel's number (`enum bpf_prog_type`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Type {
    /// A program at tc.
    Classifier = 3,
    /// A program at the creation or release of a socket.
    Socket = 9,
    /// A program at system calls that have a socket address.
    SocketAddress = 18,
}

impl Type {
    /// Returns the kernel's number.
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// The attach point of a program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// The cgroup (`bpf.cgroup`), by one link that is pinned under the program's name.
    Cgroup,
    /// Each uplink (`service.uplinks`) of a node that steers, by a link that is pinned under the
    /// program's name and the index of the device. Kernels without such links use a filter.
    Uplinks,
}

/// A program: a row of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Program {
    /// The name in the object, of its links, and in documents. Programs on the cgroup are named after their
    /// hook.
    pub name: &'static str,
    /// The type of the program.
    pub kind: Type,
    /// The hook, with the kernel's number (`enum bpf_attach_type`).
    pub hook: u32,
    /// The attach point.
    pub place: Place,
}

impl Program {
    const fn at_cgroup(name: &'static str, kind: Type, hook: u32) -> Self {
        Self {
            name,
            kind,
            hook,
            place: Place::Cgroup,
        }
    }

    /// Returns the program of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        PROGRAMS.iter().find(|program| program.name == name)
    }

    /// Returns the programs of an attach point, in the order of attachment.
    pub fn of_place(place: Place) -> impl Iterator<Item = &'static Self> {
        PROGRAMS
            .iter()
            .filter(move |program| program.place == place)
    }
}

/// The program at the release of a socket.
pub const SOCK_RELEASE: Program = Program::at_cgroup("sock_release", Type::Socket, 34);

/// The program at connects of IPv4 sockets. Every supported kernel has its hook.
pub const CONNECT4: Program = Program::at_cgroup("connect4", Type::SocketAddress, 10);

/// The program that drops packets from outside to steering prefixes.
pub const GUARD: Program = Program {
    name: "guard",
    kind: Type::Classifier,
    // BPF_TCX_INGRESS.
    hook: 46,
    place: Place::Uplinks,
};

/// All programs, in the order of attachment: those that restore a VIP precede those that replace it.
pub const PROGRAMS: &[Program] = &[
    SOCK_RELEASE,
    Program::at_cgroup("getpeername4", Type::SocketAddress, 29),
    Program::at_cgroup("getpeername6", Type::SocketAddress, 30),
    Program::at_cgroup("recvmsg4", Type::SocketAddress, 19),
    Program::at_cgroup("recvmsg6", Type::SocketAddress, 20),
    CONNECT4,
    Program::at_cgroup("connect6", Type::SocketAddress, 11),
    Program::at_cgroup("sendmsg4", Type::SocketAddress, 14),
    Program::at_cgroup("sendmsg6", Type::SocketAddress, 15),
    GUARD,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_fits_into_the_kernels_limit() {
        // BPF_OBJ_NAME_LEN is 16, with the final zero.
        assert!(MAPS.iter().all(|map| map.name.len() <= 15));
        assert!(PROGRAMS.iter().all(|program| program.name.len() <= 15));
    }
}
