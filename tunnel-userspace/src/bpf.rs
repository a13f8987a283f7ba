//! Everything that touches aya or the kernel's BPF.
//!
//! - `probe`: what this kernel can do
//! - `pins`: the folder of pins, checked and held; `pin`: one of them, whether it is ours
//! - `folders`: the folders of maps, and the steps from one set of maps to another (pure)
//! - `beside`: maps of other sizes, or in the place of an older layout's, made beside those in use
//! - `rights`: the capabilities that are needed
//! - `shapes`: the shapes of maps, as the table has them and as the kernel tells them
//! - `load`: the object, loaded on the pinned maps
//! - `programs`: the programs of an object, loaded, for those who attach them
//! - `attach`: programs at their hooks, by pinned links
//! - `logging`: one program that logs its events, in the place of the plain one
//! - `held`: writes to maps that wait for others
//! - `guard`: the program that keeps outsiders from the steering prefixes
//! - `conns`: the counts of open connections
//! - `maps`: the service maps, the steering maps, and the counters
//! - `memory`: what sockets remember
//! - `mounts`: the file systems that are needed, mounted
//! - `grace`: waiting until no program runs that ran before
//! - `walk`: everything that hangs on sockets in a socket storage
//! - `btf`: the kernel's description of its own types (pure)
//! - `kernel`: where the kernel keeps what the programs read of its structures
//! - `cgroup`: where the cgroup v2 hierarchy is
//! - `sys`: calls that aya lacks

mod attach;
mod beside;
mod btf;
mod cgroup;
mod conns;
mod folders;
mod grace;
mod guard;
mod held;
mod kernel;
mod load;
mod logging;
mod maps;
mod memory;
mod mounts;
mod pin;
mod pins;
mod probe;
mod programs;
mod rights;
mod shapes;
mod sys;
mod walk;

pub(crate) use self::kernel::places_in;
pub use self::{
    attach::{AttachError, Attached},
    cgroup::{CgroupError, check as check_cgroup, find_root},
    grace::RcuGrace,
    guard::{Guard, GuardError},
    kernel::{KernelSocketBit, Places},
    load::{DataPath, Globals, LoadError, OBJECT, Switches},
    logging::{KernelLog, KernelLogError, Level, Logging, OBJECT as LOGGING_OBJECT},
    maps::{Counters, KernelMaps, KernelSteering},
    memory::{SocketMemory, SocketMemoryError},
    mounts::{MountError, mount_bpffs, mount_cgroups},
    pins::{PinError, Pins},
    probe::{Features, ProbeError, probe},
};
