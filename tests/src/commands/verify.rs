//! `culvert-lab verify`.

use anyhow::Result;
use serde::Serialize;
use tunnel_tests::verifier::{self, Measured};
use tunnel_userspace::bpf;

#[derive(Serialize)]
struct Report {
    features: Features,
    verifier: Vec<Measured>,
}

/// What the probes say.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Features {
    set_retval: bool,
    tcx: bool,
    kernel_sockets: bool,
}

/// Loads every program in each variant that this kernel takes, and prints what its verifier made
/// of them.
pub(crate) fn run() -> Result<()> {
    let probed = bpf::probe()?;
    let verifier = verifier::measure(probed)?;
    let features = Features {
        set_retval: probed.set_retval,
        tcx: probed.tcx,
        kernel_sockets: probed.kernel_sockets.is_some(),
    };
    crate::print(&Report { features, verifier })
}
