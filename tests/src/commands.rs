//! The laboratory's commands that have files of their own.

pub(crate) mod flow;
pub(crate) mod load;
pub(crate) mod verify;
