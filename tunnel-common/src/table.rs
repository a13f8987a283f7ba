//! Every map and program, one row each: the declaration in the object, and all facts that the daemon
//! uses by a map's name. A new map is a row here, its type, its declaration in the object, and its user.

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
    /// By a size of the config.
    Of(Size, Rule),
    /// A number per CPU.
    PerCpu(u32),
    /// A fixed number; 0 if the kernel keeps one entry per socket.
    Fixed(u32),
}

/// The condition for replacing an existing map of the same layout by a new one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Remade {
    /// The sizes of its part change.
    With(Part),
    /// A larger map is needed; its values are added to those of the old one.
    Larger,
    /// Never.
    Never,
}

/// The kind of a map, with the kernel's number (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Kind {
    /// A hash.
    Hash = 1,
    /// An array.
    Array = 2,
    /// An array of which each CPU has its own.
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

/// A map.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Map {
    /// The name in the object, of the pin, and in documents.
    pub name: &'static str,
    /// The kind of the map.
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
    /// True if maps of an older layout are adopted, since their values mean the same in every layout:
    /// values of open sockets, which can't be converted, the counts that decrease when sockets close,
    /// and the meaning of steering addresses. A layout that changes such a map beyond its reserved
    /// fields must set this to false; it never may for `origin` and `conns`.
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

        /// Every map, in the order of creation. The first map of each size shows the size that maps were
        /// created with.
        pub const MAPS: &[Map] = &[$($constant),+];
    };
}

/// `BPF_F_NO_PREALLOC`: entries are allocated with their sockets.
const NO_PREALLOC: u32 = 1;
/// `BPF_F_NO_COMMON_LRU`: each CPU has its own LRU list.
const NO_COMMON_LRU: u32 = 2;
/// `BPF_F_MMAPABLE`: the daemon maps it into its memory.
pub const MMAPABLE: u32 = 1 << 10;

maps! {
    /// The index of the record of each frontend key.
    SVC = Map::new::<FrontKey, u32>("svc", Kind::Hash, Entries::Of(Size::Frontends, Rule::Exactly));
    /// The records of frontends.
    FRONT = Map::new::<u32, Front>("front", Kind::Array, Entries::Of(Size::Frontends, Rule::Spare));
    /// The slots of sets.
    SLOT = Map::new::<u32, Slot>("slot", Kind::Array, Entries::Of(Size::Slots, Rule::Spare));
    /// The ranges of clients that may use a frontend.
    SOURCE = Map::new::<u32, Source>("source", Kind::Array, Entries::Of(Size::SourceRanges, Rule::Spare));
    /// The backends.
    BE = Map::new::<u32, Backend>("be", Kind::Array, Entries::Of(Size::Backends, Rule::Spare));
    /// The number of open sockets of each backend.
    CONNS = Map::new::<u32, u64>("conns", Kind::Array, Entries::Of(Size::Backends, Rule::Spare))
        .flagged(MMAPABLE)
        .remade(Remade::Larger)
        .lasting();
    /// The translation of each socket.
    ORIGIN = Map::new::<u32, Origin>("origin", Kind::SocketStorage, Entries::Fixed(0))
        .flagged(NO_PREALLOC)
        .lasting();
    /// The older translations of unconnected sockets.
    OVERFLOW = Map::new::<OverflowKey, Overflow>("overflow", Kind::LruHash, Entries::PerCpu(1024))
        .flagged(NO_COMMON_LRU)
        .lasting();
    /// The counters by reason.
    COUNT = Map::new::<u32, u64>("count", Kind::PerCpuArray, Entries::Fixed(Reason::CAPACITY));
    /// The counters by service port.
    TALLY = Map::new::<u32, Tally>("tally", Kind::Array, Entries::Of(Size::Frontends, Rule::Spare));
    /// The backends that clients keep.
    AFFINITY = Map::new::<AffinityKey, Affinity>(
        "affinity",
        Kind::LruHash,
        Entries::Of(Size::Affinity, Rule::Exactly),
    );
    /// The index of the record of each address and port of an edge node.
    STEER = Map::new::<SteeringKey, u32>("steer", Kind::Hash, Entries::Of(Size::Steering, Rule::Probe))
        .lasting();
    /// The records of addresses and ports of edge nodes.
    STEERED = Map::new::<u32, Steered>("steered", Kind::Array, Entries::Of(Size::Steering, Rule::Resting))
        .lasting();
    /// The cookie of the host's network namespace; the families that are routed to the ingress.
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
    /// A program at system calls with an address.
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

/// The place to which a program is attached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// The cgroup (`bpf.cgroup`), by one link that is pinned under the program's name.
    Cgroup,
    /// Each uplink (`service.uplinks`) of a node that steers, by a link that is pinned under the
    /// program's name and the index of the device; on kernels without such links by a filter.
    Uplinks,
}

/// A program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Program {
    /// The name in the object, of its links, and in documents. Programs of a cgroup have the name of
    /// their hook.
    pub name: &'static str,
    /// The type of the program.
    pub kind: Type,
    /// The hook, with the kernel's number (`enum bpf_attach_type`).
    pub hook: u32,
    /// The place to which it is attached.
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

    /// Returns every program of a place, in the order of attachment.
    pub fn of_place(place: Place) -> impl Iterator<Item = &'static Self> {
        PROGRAMS
            .iter()
            .filter(move |program| program.place == place)
    }
}

/// The program at the release of a socket.
pub const SOCK_RELEASE: Program = Program::at_cgroup("sock_release", Type::Socket, 34);

/// The program at connects of IPv4 sockets, whose hook every supported kernel has.
pub const CONNECT4: Program = Program::at_cgroup("connect4", Type::SocketAddress, 10);

/// The program that drops packets from outside to steering prefixes.
pub const GUARD: Program = Program {
    name: "guard",
    kind: Type::Classifier,
    // BPF_TCX_INGRESS.
    hook: 46,
    place: Place::Uplinks,
};

/// Every program, in the order of attachment: the programs that restore a VIP precede those that replace
/// it.
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
    fn the_kernel_keeps_every_name_whole() {
        // BPF_OBJ_NAME_LEN is 16, with the final zero.
        assert!(MAPS.iter().all(|map| map.name.len() <= 15));
        assert!(PROGRAMS.iter().all(|program| program.name.len() <= 15));
    }
}
