//! All code that uses aya or calls bpf(2).
//!
//! - `probe`: detects which features this kernel has
//! - `pin_directory`: checks and locks the pin directory; `pin`: checks and removes one pin
//! - `map_directories`: names the map directories, and plans how they are renamed and removed (pure)
//! - `migration`: replaces maps that have other sizes or an older layout
//! - `map_spec`: a map's type, sizes and flags, as listed in the table or as reported by the kernel
//! - `data_path`: loads the programs with the pinned maps
//! - `flow_map`: the map of flows; `moving_flows`: moves them to a map of another size
//! - `programs`: an object's loaded programs, shared by the modules that attach them
//! - `attach`: attaches programs to the cgroup through pinned links
//! - `attachment`: keeps the programs attached and pinned
//! - `stray_programs`: finds attached programs that are not pinned in the pin directory
//! - `kernel_log`: replaces one program with its logging variant, and reads its events
//! - `batched_writes`: writes to the maps in batches
//! - `device_programs`: attaches programs to network devices
//! - `guard`: the guard on uplinks
//! - `translation`: the programs on uplinks that translate packets
//! - `open_connections`: the counts of open connections, by backend
//! - `maps`: the service maps, the steering maps, and the counters
//! - `socket_storage`: reads the translations that are stored with sockets
//! - `mounts`: mounts the file systems that a node needs
//! - `socket_iterator`: BPF iterators over the sockets with a value in a socket storage map
//! - `btf`: parses the kernel's BTF (pure)
//! - `kernel_offsets`: finds the offsets of the kernel structure fields that the programs read
//! - `path`: finds the file system that a path is on, and adds paths to errors
//! - `cgroup`: finds the cgroup v2 hierarchy
//! - `sys`: bpf(2) commands that aya lacks, and waiting for an RCU grace period

mod attach;
mod attachment;
mod batched_writes;
mod btf;
mod cgroup;
mod data_path;
mod device_programs;
mod directory_lock;
mod flow_map;
mod globals;
mod guard;
mod heartbeat;
mod kernel_log;
mod kernel_offsets;
mod map_directories;
mod map_spec;
mod maps;
mod migration;
mod mounts;
mod moving_flows;
mod open_connections;
mod open_maps;
mod packet_trial;
mod path;
mod pin;
mod pin_aliases;
mod pin_directory;
mod probe;
mod programs;
mod service_lookup;
mod socket_iterator;
mod socket_storage;
mod stray_error;
mod stray_programs;
mod stray_set;
mod sys;
mod translation;

pub(crate) use self::kernel_offsets::search_btf;
pub use self::{
    attach::{AttachError, Attached},
    attachment::{Attachment, AttachmentView},
    cgroup::{CgroupError, check as check_cgroup, find_root},
    data_path::{DataPath, LoadError, OBJECT, release_start},
    device_programs::DeviceError,
    flow_map::KernelFlows,
    globals::{Globals, PacketSettings, ProgramSettings},
    guard::Guard,
    heartbeat::{DaemonHeartbeat, PinDirectoryId},
    kernel_log::{
        KernelLog, KernelLogError, KernelLogLevel, LoggingProgram, OBJECT as LOGGING_OBJECT,
    },
    kernel_offsets::{KernelOffsets, KernelSocketBit},
    maps::{Counters, KernelMaps, KernelSteering},
    mounts::{MountError, mount_bpffs, mount_cgroups},
    moving_flows::MovingFlows,
    packet_trial::{PacketTrial, PacketTrials, TrialError},
    path::PathError,
    pin::detach_pinned_link,
    pin_directory::{LeftPins, PinDirectory, PinError},
    probe::{Features, ProbeError, probe},
    programs::FrameRun,
    service_lookup::{FrontendLookup, ServiceLookup},
    socket_iterator::supports_socket_iterator,
    socket_storage::{SocketStorage, SocketStorageError},
    stray_error::StrayError,
    stray_programs::{StrayPrograms, detach_strays, take_over_strays},
    sys::RcuGrace,
    translation::Translation,
};
