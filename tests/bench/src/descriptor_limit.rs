//! Raises the limit on open files for benchmarks with very many connections.

use anyhow::{Context as _, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The number of descriptors that a process needs apart from its connections.
const OTHERS: u64 = 1024;

/// Makes the limit on open files, which the processes that this one starts inherit, suffice for a number of connections.
pub(crate) fn raise(connections: u64) -> Result<()> {
    let wanted = OTHERS + connections;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < wanted {
        let context = "cannot raise the limit on open files (ulimit -n)";
        setrlimit(Resource::RLIMIT_NOFILE, wanted, hard.max(wanted)).context(context)?;
    }
    Ok(())
}
