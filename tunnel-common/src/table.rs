//! The table of all maps and programs, with one row for each. The code that loads, pins, migrates and checks
//! maps and programs uses these rows. A new map needs a row here, a type for its values, a declaration in the
//! BPF object, and code that uses it.

mod sizes;

use core::mem::size_of;

pub use self::sizes::{Headroom, MapGroup, MapSize, MapSizes};
use crate::{
    affinity::{Affinity, AffinityKey},
    flow::{Flow, FlowKey},
    forward::{MAX_FORWARD_RANGES, RECENT_FLOWS_OF_CPU, Run},
    fragment::{FragmentKey, FragmentRecord},
    locality::MAX_LOCAL_RANGES,
    older::{OlderFew, OlderMany, OlderShared},
    origin::{Origin, Overflow, OverflowKey},
    packet_link::PacketLink,
    reason::Reason,
    service::{Backend, Frontend, FrontendKey, ServiceCounts, Slot, SourceRange},
    service_range::{MAX_SERVICE_RANGES, ServiceRange},
    steering::{SteeringKey, SteeringRecord},
};

/// A map's number of entries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Entries {
    /// A number derived from a size in the config.
    BySize(MapSize, Headroom),
    /// A fixed number per CPU.
    PerCpu(u32),
    /// A fixed number, or 0 if the kernel keeps one entry per socket.
    Fixed(u32),
}

/// The condition under which the daemon, at startup, replaces an existing map of the same layout.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReplaceIf {
    /// A size in the map's group has changed.
    SizesChange(MapGroup),
    /// A larger map is needed. The old map's values are then added to the new one.
    TooSmall,
    /// Never.
    Never,
}

/// A map type, with its number in the kernel (`enum bpf_map_type`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum MapType {
    /// A hash.
    Hash = 1,
    /// An array.
    Array = 2,
    /// An array with separate values for each CPU.
    PerCpuArray = 6,
    /// A hash that evicts the least recently used entry.
    LruHash = 9,
    /// One value per socket, in the socket's storage.
    SocketStorage = 24,
}

impl MapType {
    /// Returns the kernel's number.
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// A map: one row of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Map {
    /// The map's name in the BPF object, in its pin path, and in the documentation.
    pub name: &'static str,
    /// The type of the map.
    pub kind: MapType,
    /// The size of a key in bytes.
    pub key: u32,
    /// The size of a value in bytes.
    pub value: u32,
    /// The flags (`BPF_F_…`).
    pub flags: u32,
    /// The number of entries.
    pub entries: Entries,
    /// The condition under which the map is replaced.
    pub replace_if: ReplaceIf,
    /// True if the daemon, at startup, adopts the map from an older layout, because its values have the same
    /// meaning in every layout. A layout that changes anything but reserved fields in the map must set this
    /// to false. That is not allowed for `origin`, `older_few`, `older_many` and `conns`, because they hold
    /// values for open sockets.
    pub is_lasting: bool,
    /// True if only programs use the map that are not attached on every node. The daemon creates the map on every node, but
    /// can't find it by the attached programs if its pin is lost.
    pub is_optional: bool,
}

impl Map {
    const fn new<K, V>(name: &'static str, kind: MapType, entries: Entries) -> Self {
        Self {
            name,
            kind,
            key: size_of_u32::<K>(),
            value: size_of_u32::<V>(),
            flags: 0,
            entries,
            replace_if: match entries {
                Entries::BySize(size, _) => ReplaceIf::SizesChange(size.group()),
                Entries::PerCpu(_) | Entries::Fixed(_) => ReplaceIf::Never,
            },
            is_lasting: false,
            is_optional: false,
        }
    }

    const fn with_flags(self, flags: u32) -> Self {
        Self { flags, ..self }
    }

    const fn replaced_if(self, remade: ReplaceIf) -> Self {
        Self {
            replace_if: remade,
            ..self
        }
    }

    const fn lasting(self) -> Self {
        Self {
            is_lasting: true,
            ..self
        }
    }

    const fn optional(self) -> Self {
        Self {
            is_optional: true,
            ..self
        }
    }

    /// Returns the number of entries, given the sizes and the number of CPUs.
    #[must_use]
    pub const fn entries(&self, sizes: MapSizes, cpus: u32) -> u32 {
        match self.entries {
            Entries::BySize(size, headroom) => headroom.entries(sizes.of(size)),
            Entries::PerCpu(each) => each * cpus,
            Entries::Fixed(number) => number,
        }
    }

    /// Returns the map with this name.
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
const fn size_of_u32<T>() -> u32 {
    size_of::<T>() as u32
}

/// Declares each map as a constant, and lists all of them in `MAPS`.
macro_rules! maps {
    ($($(#[$doc:meta])* $constant:ident = $map:expr;)+) => {
        $($(#[$doc])* pub const $constant: Map = $map;)+

        /// All maps, in the order in which they are created. The sizes of existing maps are derived from the
        /// first map that uses each size.
        pub const MAPS: &[Map] = &[$($constant),+];
    };
}

/// `BPF_F_NO_PREALLOC`: entries are allocated on demand. Socket storage requires it, and other maps take memory only for
/// the entries that they have.
const NO_PREALLOC: u32 = 1;
/// `BPF_F_NO_COMMON_LRU`: each CPU has its own LRU list.
const NO_COMMON_LRU: u32 = 2;
/// `BPF_F_MMAPABLE`: the daemon maps the values into its memory.
pub const MMAPABLE: u32 = 1 << 10;

/// The maximum number of links on which packets are translated. A node has a few uplinks, and a link for each of its pods.
pub const MAX_PACKET_LINKS: u32 = 4096;

maps! {
    /// Maps each frontend key to the index of its record, and addresses to what is known about them.
    SERVICES = Map::new::<FrontendKey, u32>("services", MapType::Hash, Entries::BySize(MapSize::Frontends, Headroom::Pairs))
        .with_flags(NO_PREALLOC);
    /// The frontends' records.
    FRONTENDS = Map::new::<u32, Frontend>("frontends", MapType::Array, Entries::BySize(MapSize::Frontends, Headroom::Update));
    /// The slots in the backend sets.
    SLOTS = Map::new::<u32, Slot>("slots", MapType::Array, Entries::BySize(MapSize::Slots, Headroom::Update));
    /// The frontends' source ranges.
    SOURCE_RANGES = Map::new::<u32, SourceRange>("source_ranges", MapType::Array, Entries::BySize(MapSize::SourceRanges, Headroom::Update));
    /// The backends.
    BACKENDS = Map::new::<u32, Backend>("backends", MapType::Array, Entries::BySize(MapSize::Backends, Headroom::Update));
    /// The number of open connections to each backend.
    CONNS = Map::new::<u32, u64>("conns", MapType::Array, Entries::BySize(MapSize::Backends, Headroom::Update))
        .with_flags(MMAPABLE)
        .replaced_if(ReplaceIf::TooSmall)
        .lasting();
    /// The last translation of each socket.
    ORIGIN = Map::new::<u32, Origin>("origin", MapType::SocketStorage, Entries::Fixed(0))
        .with_flags(NO_PREALLOC)
        .lasting();
    /// The most recently used older translations of each UDP socket that uses several VIPs.
    OLDER_FEW = Map::new::<u32, OlderFew>("older_few", MapType::SocketStorage, Entries::Fixed(0))
        .with_flags(NO_PREALLOC)
        .lasting();
    /// Further older translations of each UDP socket that uses many VIPs.
    OLDER_MANY = Map::new::<u32, OlderMany>("older_many", MapType::SocketStorage, Entries::Fixed(0))
        .with_flags(NO_PREALLOC)
        .lasting();
    /// The older translations for which there is no room in the storage of their UDP sockets.
    OLDER_SHARED = Map::new::<OverflowKey, OlderShared>(
        "older_shared",
        MapType::Hash,
        Entries::BySize(MapSize::SharedTranslations, Headroom::Pairs),
    )
    .with_flags(NO_PREALLOC);
    /// The older translations that programs of layout 7 and earlier stored for sockets that are still open.
    /// Programs only read and remove them, so a new map is as small as possible.
    OVERFLOW = Map::new::<OverflowKey, Overflow>("overflow", MapType::LruHash, Entries::PerCpu(1))
        .with_flags(NO_COMMON_LRU)
        .lasting();
    /// The counter for each reason.
    REASON_COUNTS = Map::new::<u32, u64>("reason_counts", MapType::PerCpuArray, Entries::Fixed(Reason::CAPACITY));
    /// The counters for each service port.
    SERVICE_COUNTS = Map::new::<u32, ServiceCounts>("service_counts", MapType::Array, Entries::BySize(MapSize::Frontends, Headroom::Update));
    /// The backend of each client with session affinity.
    AFFINITY = Map::new::<AffinityKey, Affinity>(
        "affinity",
        MapType::LruHash,
        Entries::BySize(MapSize::Affinity, Headroom::None),
    );
    /// Maps each steered edge node address and port to the index of its steering record.
    STEER = Map::new::<SteeringKey, u32>("steer", MapType::Hash, Entries::BySize(MapSize::Steering, Headroom::Probe))
        .lasting();
    /// The steering records, each for an edge node's address and port.
    STEERED = Map::new::<u32, SteeringRecord>("steered", MapType::Array, Entries::BySize(MapSize::Steering, Headroom::Quarantine))
        .lasting();
    /// The cookie of the host's network namespace, and the address families whose steering prefix has a
    /// route.
    HOST = Map::new::<u32, u64>("host", MapType::Array, Entries::Fixed(2)).lasting();
    /// The flows whose packets are translated.
    FLOWS = Map::new::<FlowKey, Flow>("flows", MapType::Hash, Entries::BySize(MapSize::Flows, Headroom::Triples))
        .with_flags(NO_PREALLOC)
        .lasting()
        .optional();
    /// The keys of recent flows, for each CPU. The programs look among them for flows that give way.
    RECENT_FLOWS = Map::new::<u32, FlowKey>("recent_flows", MapType::Array, Entries::PerCpu(RECENT_FLOWS_OF_CPU))
        .lasting()
        .optional();
    /// The number of flows that each CPU has begun.
    RECENT_COUNTS = Map::new::<u32, u32>("recent_counts", MapType::Array, Entries::PerCpu(1)).lasting().optional();
    /// The translations of packets that arrive or leave in fragments.
    FRAGMENTS = Map::new::<FragmentKey, FragmentRecord>(
        "fragments",
        MapType::LruHash,
        Entries::BySize(MapSize::Fragments, Headroom::Probe),
    )
    .optional();
    /// The state of the tc program that runs on each CPU.
    PACKET_RUNS = Map::new::<u32, Run>("packet_runs", MapType::PerCpuArray, Entries::Fixed(1)).optional();
    /// The links on which packets are translated.
    PACKET_LINKS = Map::new::<u32, PacketLink>("packet_links", MapType::Hash, Entries::Fixed(MAX_PACKET_LINKS))
        .with_flags(NO_PREALLOC)
        .optional();
    /// The addresses of local senders.
    LOCAL_RANGES = Map::new::<u32, SourceRange>("local_ranges", MapType::Array, Entries::Fixed(MAX_LOCAL_RANGES)).optional();
    /// The addresses of clients whose connections to edge nodes are forwarded to the ingress.
    FORWARD_RANGES = Map::new::<u32, SourceRange>("forward_ranges", MapType::Array, Entries::Fixed(MAX_FORWARD_RANGES)).optional();
    /// The ranges that contain cluster IPs.
    SERVICE_RANGES = Map::new::<u32, ServiceRange>("service_ranges", MapType::Array, Entries::Fixed(MAX_SERVICE_RANGES)).optional();
    /// The number of refused packets that were answered in the current second, and the time until which no flow begins.
    PACKET_STATE = Map::new::<u32, u64>("packet_state", MapType::Array, Entries::Fixed(2)).lasting().optional();
}

const _: () =
    assert!(ORIGIN.is_lasting && OLDER_FEW.is_lasting && OLDER_MANY.is_lasting && CONNS.is_lasting);

/// A program type, with its number in the kernel (`enum bpf_prog_type`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum ProgramType {
    /// A tc program.
    Classifier = 3,
    /// A program that runs when a socket is created or released.
    Socket = 9,
    /// A program that runs for system calls that take or return a socket address.
    SocketAddress = 18,
}

impl ProgramType {
    /// Returns the kernel's number.
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }
}

/// The point at which a program is attached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AttachPoint {
    /// The cgroup (`bpf.cgroup`), through a single link that is pinned under the program's name.
    Cgroup,
    /// Each network device that needs the program: an uplink (`service.uplinks`), or any (`service.packets.links: all`). It is
    /// attached through a link that is pinned under the program's name and the device's index, or, on kernels without such
    /// links, as a tc filter.
    Devices,
}

/// A program: one row of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Program {
    /// The program's name in the BPF object, in its link names, and in the documentation. Programs attached
    /// to the cgroup are named after their hook.
    pub name: &'static str,
    /// The type of the program.
    pub kind: ProgramType,
    /// The hook, by its number in the kernel (`enum bpf_attach_type`).
    pub hook: u32,
    /// The point at which the program is attached.
    pub attach_point: AttachPoint,
}

impl Program {
    const fn at_cgroup(name: &'static str, kind: ProgramType, hook: u32) -> Self {
        Self {
            name,
            kind,
            hook,
            attach_point: AttachPoint::Cgroup,
        }
    }

    /// Returns the program with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        PROGRAMS.iter().find(|program| program.name == name)
    }

    /// Returns the programs for an attach point, in the order in which they are attached.
    pub fn at_attach_point(attach_point: AttachPoint) -> impl Iterator<Item = &'static Self> {
        PROGRAMS
            .iter()
            .filter(move |program| program.attach_point == attach_point)
    }
}

/// The program that runs when a socket is released.
pub const SOCK_RELEASE: Program = Program::at_cgroup("sock_release", ProgramType::Socket, 34);

/// The program that runs when an IPv4 socket connects. Every supported kernel has its hook.
pub const CONNECT4: Program = Program::at_cgroup("connect4", ProgramType::SocketAddress, 10);

/// The program that drops packets sent from outside the node to a steering prefix.
pub const GUARD: Program = Program {
    name: "guard",
    kind: ProgramType::Classifier,
    // BPF_TCX_INGRESS.
    hook: 46,
    attach_point: AttachPoint::Devices,
};

/// The program that changes the destinations of packets that arrive on uplinks.
pub const IN: Program = Program {
    name: "in",
    kind: ProgramType::Classifier,
    // BPF_TCX_INGRESS.
    hook: 46,
    attach_point: AttachPoint::Devices,
};

/// The program that changes the sources of packets that leave on uplinks.
pub const OUT: Program = Program {
    name: "out",
    kind: ProgramType::Classifier,
    // BPF_TCX_EGRESS.
    hook: 47,
    attach_point: AttachPoint::Devices,
};

/// All programs, in the order in which they are attached: those that restore a VIP come before those that
/// replace it.
pub const PROGRAMS: &[Program] = &[
    SOCK_RELEASE,
    Program::at_cgroup("getpeername4", ProgramType::SocketAddress, 29),
    Program::at_cgroup("getpeername6", ProgramType::SocketAddress, 30),
    Program::at_cgroup("recvmsg4", ProgramType::SocketAddress, 19),
    Program::at_cgroup("recvmsg6", ProgramType::SocketAddress, 20),
    CONNECT4,
    Program::at_cgroup("connect6", ProgramType::SocketAddress, 11),
    Program::at_cgroup("sendmsg4", ProgramType::SocketAddress, 14),
    Program::at_cgroup("sendmsg6", ProgramType::SocketAddress, 15),
    GUARD,
    OUT,
    IN,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_fits_into_the_kernels_limit() {
        // BPF_OBJ_NAME_LEN is 16, including the terminating zero byte.
        assert!(MAPS.iter().all(|map| map.name.len() <= 15));
        assert!(PROGRAMS.iter().all(|program| program.name.len() <= 15));
    }

    #[test]
    fn a_map_that_is_not_enabled_has_an_entry() {
        for group in [MapGroup::Steering, MapGroup::Flows, MapGroup::Fragments] {
            let sizes = MapSizes::default().without(group);
            let empty = MAPS
                .iter()
                .find(|map| map.kind != MapType::SocketStorage && map.entries(sizes, 1) == 0);
            assert_eq!(empty.map(|map| map.name), None);
        }
    }
}
