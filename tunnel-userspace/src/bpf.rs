//! Everything that touches aya or the kernel's BPF.
//!
//! - `probe`: what this kernel can do
//! - `pins`: the folder of pins, checked and held; `pin`: one of them, whether it is ours
//! - `folders`: the folders of maps, and the steps from one set of maps to another (pure)
//! - `migration`: maps of other sizes, or in the place of an older layout's, made beside those in use
//! - `shapes`: the shapes of maps, as the table has them and as the kernel tells them
//! - `load`: the object, loaded on the pinned maps
//! - `programs`: the programs of an object, loaded, for those who attach them
//! - `attach`: programs at their hooks, by pinned links
//! - `kernel_log`: one program that logs its events, in the place of the plain one
//! - `pending`: writes to maps that wait for others
//! - `guard`: the program that keeps outsiders from the steering prefixes
//! - `conns`: the counts of open connections
//! - `maps`: the service maps, the steering maps, and the counters
//! - `socket_storage`: what sockets remember
//! - `mounts`: the file systems that are needed, mounted
//! - `iterator`: a BPF iterator over everything that hangs on sockets in a socket storage
//! - `btf`: the kernel's description of its own types (pure)
//! - `kernel`: where the kernel keeps what the programs read of its structures
//! - `path`: file systems, and the error of a step on a path
//! - `cgroup`: where the cgroup v2 hierarchy is
//! - `sys`: calls that aya lacks, also to wait until no program runs that ran before

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
