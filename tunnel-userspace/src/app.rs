//! The roles of the binary (`culvert node`, `culvert agent` and others). Each file starts one role's tasks
//! and connects them.

mod agent;
mod ca;
mod certificate;
mod cleanup;
mod conntrack_settings;
mod controller;
mod descriptor_limit;
mod node;
mod node_tunnel;
mod prepare_mounts;
mod shutdown_signals;
mod sockets_helper;
mod sources;
mod state_dir;
mod translation_probe;

use std::{borrow::Cow, error::Error, path::PathBuf};

pub use self::{
    agent::agent,
    ca::{ca_init, ca_issue_agent, ca_issue_gateway},
    cleanup::cleanup,
    controller::controller,
    node::node,
    prepare_mounts::prepare_mounts,
    sockets_helper::sockets_helper,
};
use crate::{bpf, config::Config};

/// The error with which a role exits.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// A step of the role failed.
    #[error("{step}")]
    Start {
        /// The step that failed, such as `cannot load the maps`.
        step: Cow<'static, str>,
        /// The error that made the step fail.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// A module returned an error that already names the failed step.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
    /// A task ended before the drain began.
    #[error("task {name} ended unexpectedly")]
    TaskEnded {
        /// The name of the task, or its panic message.
        name: String,
    },
}

/// Returns a function for `map_err` that adds the name of the failed step to an error.
fn failed<E>(step: impl Into<Cow<'static, str>>) -> impl FnOnce(E) -> RoleError
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    move |source| RoleError::Start {
        step: step.into(),
        source: source.into(),
    }
}

/// Returns the configured cgroup, or else the root of the cgroup v2 hierarchy.
fn cgroup_of(config: &Config) -> Result<PathBuf, RoleError> {
    match &config.bpf.cgroup.0 {
        Some(path) => Ok(path.clone()),
        None => bpf::find_root().map_err(failed("cannot find the cgroup")),
    }
}

/// Wraps an error that already names the failed step.
fn other_error(error: impl Into<Box<dyn Error + Send + Sync>>) -> RoleError {
    RoleError::Other(error.into())
}
