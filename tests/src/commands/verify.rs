//! `culvert-lab verify`.

use anyhow::Result;
use serde::Serialize;
use tunnel_userspace::bpf::{self, Measured};

#[derive(Serialize)]
struct Report {
    verifier: Vec<Measured>,
}

/// Loads every program in each variant that this kernel takes, and prints what its verifier made
/// of them.
pub(crate) fn run() -> Result<()> {
    let verifier = bpf::measure(bpf::probe()?)?;
    crate::print(&Report { verifier })
}
