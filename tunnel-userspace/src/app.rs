//! Each file wires one role, in order, and nothing else.

mod canary;
mod cleanup;
mod node;
mod state;

pub use self::{
    cleanup::{CleanupError, cleanup},
    node::{NodeError, node},
    state::StateError,
};
