//! Subcommands of `culvert-lab`.

pub(crate) mod flow;
pub(crate) mod load;
pub(crate) mod verify;
