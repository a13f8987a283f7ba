//! The subcommands of `culvert-lab`.

pub(crate) mod empty_programs;
pub(crate) mod load;
pub(crate) mod throughput;
pub(crate) mod tun;
pub(crate) mod verify;
