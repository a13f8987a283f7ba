//! All code that uses aya or the kernel's BPF.
//!
//! - `probe`: the features of this kernel
//! - `pins`: the folder of pins, checked and locked; `pin`: one pin, its check and removal
//! - `folders`: the folders of maps, and the steps from one set of maps to another (pure)
//! - `migration`: maps of other sizes, or to replace an older layout's, filled next to those in use
//! - `shapes`: the shapes of maps, by the table and by the kernel
//! - `load`: the object, loaded on the pinned maps
//! - `programs`: the programs of an object, loaded, for the modules that attach them
//! - `attach`: programs at their hooks, by pinned links
//! - `kernel_log`: the variant of one program that logs its events, attached instead of the plain one
//! - `pending`: batched writes to maps
//! - `guard`: the program that keeps outsiders from the steering prefixes
//! - `conns`: the counts of open connections
//! - `maps`: the service maps, the steering maps, and the counters
//! - `socket_storage`: the translations that sockets remember
//! - `mounts`: mounts the file systems that a node needs
//! - `iterator`: a BPF iterator over all values of a socket storage
//! - `btf`: the kernel's description of its own types (pure)
//! - `kernel`: the offsets in the kernel's structures that the programs read
//! - `path`: file systems, and the error of a step on a path
//! - `cgroup`: finds the cgroup v2 hierarchy
//! - `sys`: calls that aya lacks, and the wait for an RCU grace period

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
