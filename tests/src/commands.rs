//! The subcommands of `culvert-lab`.

pub(crate) mod load;
pub(crate) mod throughput;
pub(crate) mod verify;
