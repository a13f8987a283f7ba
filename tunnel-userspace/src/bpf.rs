//! All code that uses aya or the kernel's BPF.
//!
//! - `probe`: detects features of this kernel
//! - `pins`: checks and locks the folder of pins; `pin`: checks and removes one pin
//! - `folders`: names the folders of maps, and plans their renames and removals (pure)
//! - `migration`: replaces maps of other sizes or of an older layout
//! - `shapes`: type, sizes and flags of maps, from the table or from the kernel
//! - `load`: loads the programs on the pinned maps
//! - `programs`: the loaded programs, shared by the modules that attach them
//! - `attach`: attaches programs to the cgroup by pinned links
//! - `kernel_log`: replaces one program by its logging variant, and reads the events
//! - `pending`: batched writes to maps
//! - `guard`: attaches the guard to uplinks
//! - `conns`: the counts of open connections
//! - `maps`: the service maps, the steering maps, and the counters
//! - `socket_storage`: reads the stored translations of sockets
//! - `mounts`: mounts the file systems that a node needs
//! - `iterator`: a BPF iterator over all values of a socket storage
//! - `btf`: parses the kernel's BTF (pure)
//! - `kernel`: finds the offsets of kernel structure fields that the programs read
//! - `path`: file systems, and errors with a path
//! - `cgroup`: finds the cgroup v2 hierarchy
//! - `sys`: calls of bpf(2) that aya lacks, and the wait for an RCU grace period

mod attach;
mod btf;
mod cgroup;
mod conns;
mod folders;
mod guard;
mod iterator;
mod kernel;
mod kernel_log;
mod load;
mod maps;
mod migration;
mod mounts;
mod path;
mod pending;
mod pin;
mod pins;
mod probe;
mod programs;
mod shapes;
mod socket_storage;
mod sys;

pub(crate) use self::kernel::places_in;
pub use self::{
    attach::{AttachError, Attached},
    cgroup::{CgroupError, check as check_cgroup, find_root},
    guard::{Guard, GuardError},
    kernel::{KernelSocketBit, Places},
    kernel_log::{KernelLog, KernelLogError, Level, Logging, OBJECT as LOGGING_OBJECT},
    load::{DataPath, Globals, LoadError, OBJECT, Switches},
    maps::{Counters, KernelMaps, KernelSteering},
    mounts::{MountError, mount_bpffs, mount_cgroups},
    path::PathError,
    pins::{PinError, Pins},
    probe::{Features, ProbeError, probe},
    socket_storage::{SocketMemory, SocketMemoryError},
    sys::RcuGrace,
};
