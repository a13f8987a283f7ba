//! Each file wires one role, in order, and nothing else.

mod agent;
mod ca;
mod canary;
mod cleanup;
mod helper;
mod node;
mod prepare;
mod sources;
mod state;
mod stop;
mod tunnel;

pub use self::{
    agent::{AgentError, agent},
    ca::{ca_init, ca_issue_agent, ca_issue_gateway},
    cleanup::{CleanupError, cleanup},
    helper::{HelperError, sockets},
    node::{NodeError, node},
    prepare::{PrepareError, prepare},
    state::StateError,
};
