//! Every map and program, a row each: what the object declares, and all that the daemon knows of a map
//! by its name. A further map is a row here, its type, its declaration in the object, and who uses it.

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

/// How many entries a map has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Entries {
    /// As the config says.
    Of(Size, Rule),
    /// So many for each CPU.
    PerCpu(u32),
    /// So many; none where the kernel keeps one for each socket.
    Fixed(u32),
}

/// When a map is made anew where the daemon finds one of its own layout.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Remade {
    /// Where the sizes of its part change.
    With(Part),
    /// Where a larger one is needed; it is added up with the old one.
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
    /// A hash that forgets what was not used for longest.
    LruHash = 9,
    /// A value that hangs on a socket.
    SocketStorage = 24,
}

impl Kind {
    /// The kernel's number.
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// A map.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Map {
    /// Its name: in the object, of the pin, and in documents.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Bytes of a key.
    pub key: u32,
    /// Bytes of a value.
    pub value: u32,
    /// `BPF_F_…`.
    pub flags: u32,
    /// How many entries it has.
    pub entries: Entries,
    /// When it is made anew.
    pub remade: Remade,
    /// Whether it is taken over from an older layout, since what it holds means the same in all of them:
    /// what hangs on sockets, which can't be converted, the counts that go down when those close, and
    /// what steering addresses stand for. A layout that changes such a map otherwise than in its reserve
    /// takes this from it; from `origin` and `conns` it never may.
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

    /// How many entries it has for sizes, and on a machine with so many CPUs.
    #[must_use]
    pub const fn entries(&self, sizes: Sizes, cpus: u32) -> u32 {
        match self.entries {
            Entries::Of(size, rule) => rule.entries(sizes.of(size)),
            Entries::PerCpu(each) => each * cpus,
            Entries::Fixed(number) => number,
        }
    }

    /// The map of that name.
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

        /// Every map, in the order in which they are created. The first of a size tells what size maps
        /// were made with.
        pub const MAPS: &[Map] = &[$($constant),+];
    };
}

/// `BPF_F_NO_PREALLOC`: entries come into being with their sockets.
const NO_PREALLOC: u32 = 1;
/// `BPF_F_NO_COMMON_LRU`: each CPU has a list of its own of what was not used for longest.
const NO_COMMON_LRU: u32 = 2;
/// `BPF_F_MMAPABLE`: the daemon maps it into its memory.
pub const MMAPABLE: u32 = 1 << 10;

maps! {
    /// Front key to the index of its record.
    SVC = Map::new::<FrontKey, u32>("svc", Kind::Hash, Entries::Of(Size::Fronts, Rule::Exactly));
    /// Records of fronts.
    FRONT = Map::new::<u32, Front>("front", Kind::Array, Entries::Of(Size::Fronts, Rule::Spare));
    /// Places in sets.
    SLOT = Map::new::<u32, Slot>("slot", Kind::Array, Entries::Of(Size::Slots, Rule::Spare));
    /// Ranges of clients that may use a front.
    SOURCE = Map::new::<u32, Source>("source", Kind::Array, Entries::Of(Size::Sources, Rule::Spare));
    /// Backends.
    BE = Map::new::<u32, Backend>("be", Kind::Array, Entries::Of(Size::Backends, Rule::Spare));
    /// How many open sockets remember each backend.
    CONNS = Map::new::<u32, u64>("conns", Kind::Array, Entries::Of(Size::Backends, Rule::Spare))
        .flagged(MMAPABLE)
        .remade(Remade::Larger)
        .lasting();
    /// What a socket remembers.
    ORIGIN = Map::new::<u32, Origin>("origin", Kind::SocketStorage, Entries::Fixed(0))
        .flagged(NO_PREALLOC)
        .lasting();
    /// Older translations of unconnected sockets.
    OVERFLOW = Map::new::<OverflowKey, Overflow>("overflow", Kind::LruHash, Entries::PerCpu(1024))
        .flagged(NO_COMMON_LRU)
        .lasting();
    /// Counters by reason.
    COUNT = Map::new::<u32, u64>("count", Kind::PerCpuArray, Entries::Fixed(Reason::CAPACITY));
    /// What was sent on and refused, by service port.
    TALLY = Map::new::<u32, Tally>("tally", Kind::Array, Entries::Of(Size::Fronts, Rule::Spare));
    /// Which backend a client keeps.
    AFFINITY = Map::new::<AffinityKey, Affinity>(
        "affinity",
        Kind::LruHash,
        Entries::Of(Size::Affinity, Rule::Exactly),
    );
    /// Address and port of an edge node to the index of its record.
    STEER = Map::new::<SteeringKey, u32>("steer", Kind::Hash, Entries::Of(Size::Steering, Rule::Probe))
        .lasting();
    /// Addresses and ports of edge nodes that are steered.
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
    /// At tc.
    Classifier = 3,
    /// At a socket's making and end.
    Socket = 9,
    /// At calls that have an address.
    SocketAddress = 18,
}

impl Type {
    /// The kernel's number.
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// Where a program is linked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// At the cgroup (`bpf.cgroup`), by one link that is pinned under the program's name.
    Cgroup,
    /// At each uplink (`service.uplinks`) where something is steered, by a link that is pinned under the
    /// program's name and the index of the device; on kernels without such links by a filter.
    Uplinks,
}

/// A program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Program {
    /// Its name: in the object, of its links, and in documents. Those of a cgroup are named after their
    /// hook.
    pub name: &'static str,
    /// Its type.
    pub kind: Type,
    /// Its hook, with the kernel's number (`enum bpf_attach_type`).
    pub hook: u32,
    /// Where it is linked.
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

    /// The program of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        PROGRAMS.iter().find(|program| program.name == name)
    }

    /// Every program of a place, in the order in which they are attached.
    pub fn of_place(place: Place) -> impl Iterator<Item = &'static Self> {
        PROGRAMS
            .iter()
            .filter(move |program| program.place == place)
    }
}

/// The program at the close of a socket.
pub const SOCK_RELEASE: Program = Program::at_cgroup("sock_release", Type::Socket, 34);

/// The program at connects of IPv4 sockets, whose hook every kernel has that can be used.
pub const CONNECT4: Program = Program::at_cgroup("connect4", Type::SocketAddress, 10);

/// The program that keeps what comes from outside away from steering prefixes.
pub const GUARD: Program = Program {
    name: "guard",
    kind: Type::Classifier,
    // BPF_TCX_INGRESS.
    hook: 46,
    place: Place::Uplinks,
};

/// Every program, in the order in which they are attached: what brings a VIP back stands before what
/// takes it away.
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
