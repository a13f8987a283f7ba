//! Everything that touches aya or the kernel's BPF.
//!
//! - [`probe`]: what this kernel can do
//! - [`pins`]: the folder of pins, checked and held
//! - [`shapes`]: the shapes of the pinned maps
//! - [`load`]: the object, loaded on the pinned maps
//! - [`attach`]: programs on a cgroup, by pinned links
//! - [`maps`]: the service maps, and the counters
//! - [`grace`]: waiting until no program runs that ran before
//! - [`cgroup`]: where the cgroup v2 hierarchy is
//! - [`sys`]: calls that aya lacks

mod attach;
mod cgroup;
mod grace;
mod load;
mod maps;
mod pins;
mod probe;
mod shapes;
mod sys;

pub use self::{
    attach::{AttachError, Attached},
    cgroup::{CgroupError, check as check_cgroup, find_root},
    grace::RcuGrace,
    load::{DataPath, LoadError, raise_memory_limit},
    maps::{Counters, KernelMaps},
    pins::{PinError, Pins},
    probe::{Features, ProbeError, probe},
};
