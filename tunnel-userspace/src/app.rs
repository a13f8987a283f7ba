//! The roles of the binary (`culvert node`, `culvert agent` and others): each file starts the tasks of one
//! role and connects them.

mod agent;
mod ca;
mod cleanup;
mod node;
mod node_tunnel;
mod prepare_mounts;
mod shutdown_signals;
mod sockets_helper;
mod sources;
mod state_dir;
mod translation_probe;

use std::{borrow::Cow, error::Error};

pub use self::{
    agent::agent,
    ca::{ca_init, ca_issue_agent, ca_issue_gateway},
    cleanup::cleanup,
    node::node,
    prepare_mounts::prepare_mounts,
    sockets_helper::sockets_helper,
};

/// The error that ends a role.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// A step failed.
    #[error("{step}")]
    Start {
        /// The failed step, as in `cannot load the maps`.
        step: Cow<'static, str>,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A module failed with an error that names the step itself.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
    /// A task ended before the drain.
    #[error("task {name} ended unexpectedly")]
    TaskEnded {
        /// The name of the task, or its panic message.
        name: String,
    },
}

/// Returns a function for `map_err` that adds the failed step to an error.
fn failed<E>(step: impl Into<Cow<'static, str>>) -> impl FnOnce(E) -> RoleError
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    move |source| RoleError::Start {
        step: step.into(),
        source: source.into(),
    }
}

/// Wraps an error that names the failed step itself.
fn other_error(error: impl Into<Box<dyn Error + Send + Sync>>) -> RoleError {
    RoleError::Other(error.into())
}
