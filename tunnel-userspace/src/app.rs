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
    agent::agent,
    ca::{ca_init, ca_issue_agent, ca_issue_gateway},
    cleanup::{CleanupError, cleanup},
    helper::sockets,
    node::node,
    prepare::{PrepareError, prepare},
    state::StateError,
};

/// A role could not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// A step of the start failed.
    #[error("{step}")]
    Start {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A task ended that should not.
    #[error("task {name} ended")]
    TaskEnded {
        /// Its name.
        name: String,
    },
}

fn failed<E>(step: &'static str) -> impl FnOnce(E) -> RoleError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    move |source| RoleError::Start {
        step,
        source: source.into(),
    }
}
