//! The features of this kernel, probed once. A failed probe never counts as a missing feature.

use std::io;

use tunnel_common::table::CONNECT4;

use super::{
    btf::Btf,
    kernel::{self, KernelSocketBit, Places},
    load, sys,
};
use crate::capabilities::{self, BPF, NET_ADMIN, PERFMON};

/// The features of this kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Features {
    /// `bpf_set_retval` may be called from socket hooks (Linux 6.1): a refused connect gets its own
    /// error. Otherwise it is redirected to an address that refuses.
    pub set_retval: bool,
    /// Programs at tc are attached by links (Linux 6.6). Otherwise by filters.
    pub tcx: bool,
    /// The offsets of the addresses of network namespaces, if the kernel has BTF and lets programs read
    /// its memory. Otherwise only sockets that are bound to an address have a known client address.
    pub addresses: Option<Places>,
    /// The bit that marks sockets of the kernel's own. None if it is unknown; then their connects count
    /// as open for ever.
    pub kernel_sockets: Option<KernelSocketBit>,
}

/// The error of probing a feature.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The process lacks capabilities, without which the kernel refuses the programs.
    #[error("this process lacks {}, without which the kernel refuses the programs", .missing.join(" and "))]
    Rights {
        /// The missing capabilities.
        missing: Vec<&'static str>,
    },
    /// The kernel refuses the programs, and no capability is known to be missing.
    #[error(
        "the kernel refuses programs: before Linux 5.11 the limit of locked memory, ulimit -l, may \
         be too low, which takes CAP_SYS_RESOURCE to raise"
    )]
    Memory {
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel refused the probe.
    #[error("cannot find out whether this kernel has {feature}")]
    Feature {
        /// The feature.
        feature: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Probes the kernel, after raising the limit of locked memory, against which Linux before 5.11 counts
/// programs and maps.
///
/// # Errors
///
/// The kernel refused the probe itself, for lack of a privilege or of memory.
pub fn probe() -> Result<Features, ProbeError> {
    // If the capabilities are unknown, the kernel's refusal gives the cause.
    let missing = capabilities::missing(&[BPF, NET_ADMIN, PERFMON]).unwrap_or_default();
    if !missing.is_empty() {
        return Err(ProbeError::Rights { missing });
    }
    let is_raised = load::raise_memory_limit();
    match ask() {
        Err(ProbeError::Feature { feature: _, source })
            if !is_raised && source.kind() == io::ErrorKind::PermissionDenied =>
        {
            Err(ProbeError::Memory { source })
        }
        other => other,
    }
}

fn ask() -> Result<Features, ProbeError> {
    let told = |feature, answer: io::Result<bool>| {
        answer.map_err(|source| ProbeError::Feature { feature, source })
    };
    let loads = |feature, program: &[u64]| told(feature, sys::loads(program, CONNECT4.hook));
    if !loads("socket hooks", &ALLOW)? {
        let refused = Err(io::Error::other("not even an empty program loads"));
        told("socket hooks", refused)?;
    }
    let reads = loads("bpf_probe_read_kernel in socket hooks", &CALL_PROBE_READ)?;
    let description = if reads { kernel::description() } else { None };
    let types = description.as_deref().and_then(Btf::parse);
    Ok(Features {
        set_retval: loads("bpf_set_retval in socket hooks", &CALL_SET_RETVAL)?,
        tcx: told("links at tc", sys::knows_tcx(&ALLOW))?,
        addresses: types.as_ref().and_then(Places::find),
        kernel_sockets: types.as_ref().and_then(KernelSocketBit::find),
    })
}

/// `r1 = -111; call bpf_set_retval; r0 = 0; exit`.
const CALL_SET_RETVAL: [u64; 4] = [
    0xffff_ff91_0000_01b7,
    0x0000_00bb_0000_0085,
    0x0000_0000_0000_00b7,
    0x95,
];

/// `r1 = r10; r1 += -8; r2 = 8; r3 = 0; call bpf_probe_read_kernel; r0 = 0; exit`. The helper is missing
/// if the kernel is locked down for confidentiality (kernel_lockdown(7)).
const CALL_PROBE_READ: [u64; 7] = [
    0xa1bf,
    0xffff_fff8_0000_0107,
    0x0000_0008_0000_02b7,
    0x0000_0000_0000_03b7,
    0x0000_0071_0000_0085,
    0x0000_0000_0000_00b7,
    0x95,
];

/// `r0 = 1; exit`, which every kernel with these hooks loads.
const ALLOW: [u64; 2] = [0x0000_0001_0000_00b7, 0x95];
