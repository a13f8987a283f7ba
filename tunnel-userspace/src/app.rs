//! Each file wires one role, in order, and nothing else.

mod ca;
mod canary;
mod cleanup;
mod node;
mod state;

pub use self::{
    ca::{ca_init, ca_issue_agent, ca_issue_gateway},
    cleanup::{CleanupError, cleanup},
    node::{NodeError, node},
    state::StateError,
};
