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

use std::{borrow::Cow, error::Error};

pub use self::{
    agent::agent,
    ca::{ca_init, ca_issue_agent, ca_issue_gateway},
    cleanup::cleanup,
    helper::sockets,
    node::node,
    prepare::prepare,
};

/// A role failed to start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// A step of the start failed.
    #[error("{step}")]
    Start {
        /// The step that failed.
        step: Cow<'static, str>,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A part failed; its error names the step.
    #[error(transparent)]
    Part(Box<dyn Error + Send + Sync>),
    /// A task ended before the drain.
    #[error("task {name} ended")]
    TaskEnded {
        /// The name of the task.
        name: String,
    },
}

fn failed<E>(step: impl Into<Cow<'static, str>>) -> impl FnOnce(E) -> RoleError
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    move |source| RoleError::Start {
        step: step.into(),
        source: source.into(),
    }
}

fn part(error: impl Into<Box<dyn Error + Send + Sync>>) -> RoleError {
    RoleError::Part(error.into())
}
