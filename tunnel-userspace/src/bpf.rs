//! All code that uses aya or the kernel's BPF.
//!
//! - `probe`: detects features of this kernel
//! - `pin_directory`: checks and locks the directory of pins; `pin`: checks and removes one pin
//! - `map_directories`: names the directories of maps, and plans their renames and removals (pure)
//! - `migration`: replaces maps of other sizes or of an older layout
//! - `map_spec`: type, sizes and flags of maps, from the table or from the kernel
//! - `data_path`: loads the programs on the pinned maps
//! - `programs`: the loaded programs, shared by the modules that attach them
//! - `attach`: attaches programs to the cgroup by pinned links
//! - `kernel_log`: replaces one program by its logging variant, and reads the events
//! - `batched_writes`: batched writes to maps
//! - `guard`: attaches the guard to uplinks
//! - `open_connections`: the counts of open connections
//! - `maps`: the service maps, the steering maps, and the counters
//! - `socket_storage`: reads the stored translations of sockets
//! - `mounts`: mounts the file systems that a node needs
//! - `socket_iterator`: a BPF iterator over all values of a socket storage
//! - `btf`: parses the kernel's BTF (pure)
//! - `kernel_offsets`: finds the offsets of kernel structure fields that the programs read
//! - `path`: file systems, and errors with a path
//! - `cgroup`: finds the cgroup v2 hierarchy
//! - `sys`: calls of bpf(2) that aya lacks, and the wait for an RCU grace period

mod attach;
mod batched_writes;
mod btf;
mod cgroup;
mod data_path;
mod guard;
mod kernel_log;
mod kernel_offsets;
mod map_directories;
mod map_spec;
mod maps;
mod migration;
mod mounts;
mod open_connections;
mod path;
mod pin;
mod pin_directory;
mod probe;
mod programs;
mod socket_iterator;
mod socket_storage;
mod sys;

pub(crate) use self::kernel_offsets::search_btf;
pub use self::{
    attach::{AttachError, Attached},
    cgroup::{CgroupError, check as check_cgroup, find_root},
    data_path::{DataPath, Globals, LoadError, OBJECT, ProgramSettings},
    guard::{Guard, GuardError},
    kernel_log::{
        KernelLog, KernelLogError, KernelLogLevel, LoggingProgram, OBJECT as LOGGING_OBJECT,
    },
    kernel_offsets::{KernelOffsets, KernelSocketBit},
    maps::{Counters, KernelMaps, KernelSteering},
    mounts::{MountError, mount_bpffs, mount_cgroups},
    path::PathError,
    pin_directory::{PinDirectory, PinError},
    probe::{Features, ProbeError, probe},
    socket_storage::{SocketStorage, SocketStorageError},
    sys::RcuGrace,
};
