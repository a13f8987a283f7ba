//! The subcommand `culvert-lab verify`.

use anyhow::Result;
use serde_json::json;
use tunnel_tests::verifier;
use tunnel_userspace::bpf;

/// Loads every kernel program in each variant that this kernel accepts, then prints the features that were
/// probed and the verifier's statistics.
pub(crate) fn run() -> Result<()> {
    let probed = bpf::probe()?;
    crate::print(&json!({
        "features": {
            "setRetval": probed.set_retval,
            "tcx": probed.tcx,
            "kernelSockets": probed.kernel_socket_bit.is_some(),
        },
        "verifier": verifier::measure(probed)?,
    }))
}
