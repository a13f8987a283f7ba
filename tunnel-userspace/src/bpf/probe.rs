//! Probes which features this kernel has. A failed probe is an error; it never means that the feature is
//! missing.

use std::io;

use tunnel_common::table::CONNECT4;

use super::{
    btf::Btf,
    data_path,
    kernel_offsets::{self, KernelOffsets, KernelSocketBit},
    sys,
};
use crate::capabilities::{self, BPF, NET_ADMIN, PERFMON};

/// The features that this kernel has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Features {
    /// True if socket hooks may call `bpf_set_retval` (Linux 6.1), so that a refused connect() fails with an
    /// error of Culvert's choice. Otherwise it is redirected to an address that refuses connections.
    pub set_retval: bool,
    /// True if tc programs can be attached through links (Linux 6.6). Otherwise they are attached as filters.
    pub tcx: bool,
    /// True if programs may call `bpf_ktime_get_coarse_ns` (Linux 5.11), which doesn't read a hardware clock. Otherwise
    /// they read it for each packet.
    pub coarse_clock: bool,
    /// The offsets that programs use to find the addresses of a network namespace. `None` if the kernel has
    /// no BTF, or doesn't let programs read its memory; the client address is then known only for sockets
    /// that are bound to an address.
    pub kernel_offsets: Option<KernelOffsets>,
    /// The bit that marks kernel sockets. `None` if it is unknown; kernel sockets' connections then count as
    /// open forever.
    pub kernel_socket_bit: Option<KernelSocketBit>,
}

/// An error that can occur when probing this kernel.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The process lacks capabilities that are needed to load programs.
    #[error("this process lacks {}, which the kernel requires to load programs", .missing.join(" and "))]
    Capabilities {
        /// The missing capabilities.
        missing: Vec<&'static str>,
    },
    /// The kernel rejects programs, and no capability is known to be missing.
    #[error(
        "the kernel rejects programs: before Linux 5.11, the limit of locked memory, ulimit -l, may \
         be too low; raising it needs CAP_SYS_RESOURCE"
    )]
    Memory {
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A probe failed.
    #[error("cannot probe this kernel for {feature}")]
    Feature {
        /// The feature that was probed for.
        feature: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Probes which features this kernel has. First raises the limit on locked memory, since programs and maps
/// count against it before Linux 5.11.
///
/// # Errors
///
/// Returns an error if a probe fails because a privilege is missing or memory is short.
pub fn probe() -> Result<Features, ProbeError> {
    // If the capabilities can't be read, a later error from the kernel shows the cause.
    let missing = capabilities::missing(&[BPF, NET_ADMIN, PERFMON]).unwrap_or_default();
    if !missing.is_empty() {
        return Err(ProbeError::Capabilities { missing });
    }
    let is_raised = data_path::raise_memory_limit();
    match probe_features() {
        Err(ProbeError::Feature { feature: _, source })
            if !is_raised && source.kind() == io::ErrorKind::PermissionDenied =>
        {
            Err(ProbeError::Memory { source })
        }
        other => other,
    }
}

fn probe_features() -> Result<Features, ProbeError> {
    let checked = |feature, result: io::Result<bool>| {
        result.map_err(|source| ProbeError::Feature { feature, source })
    };
    let can_load =
        |feature, program: &[u64]| checked(feature, sys::can_load(program, CONNECT4.hook));
    if !can_load("socket hooks", &ALLOW)? {
        let rejected = Err(io::Error::other("the kernel rejects even an empty program"));
        checked("socket hooks", rejected)?;
    }
    let can_read_kernel = can_load("bpf_probe_read_kernel in socket hooks", &CALL_PROBE_READ)?;
    let btf = if can_read_kernel {
        kernel_offsets::read_btf()
    } else {
        None
    };
    let types = btf.as_deref().and_then(Btf::parse);
    Ok(Features {
        set_retval: can_load("bpf_set_retval in socket hooks", &CALL_SET_RETVAL)?,
        tcx: checked("links at tc", sys::supports_tcx(&ALLOW))?,
        coarse_clock: can_load("bpf_ktime_get_coarse_ns", &CALL_COARSE_CLOCK)?,
        kernel_offsets: types.as_ref().and_then(KernelOffsets::find),
        kernel_socket_bit: types.as_ref().and_then(KernelSocketBit::find),
    })
}

/// `r1 = -111; call bpf_set_retval; r0 = 0; exit`.
const CALL_SET_RETVAL: [u64; 4] = [
    0xffff_ff91_0000_01b7,
    0x0000_00bb_0000_0085,
    0x0000_0000_0000_00b7,
    0x95,
];

/// `call bpf_ktime_get_coarse_ns; r0 = 0; exit`.
const CALL_COARSE_CLOCK: [u64; 3] = [0x0000_00a0_0000_0085, 0x0000_0000_0000_00b7, 0x95];

/// `r1 = r10; r1 += -8; r2 = 8; r3 = 0; call bpf_probe_read_kernel; r0 = 0; exit`. The kernel doesn't offer
/// this helper while it is locked down for confidentiality (kernel_lockdown(7)).
const CALL_PROBE_READ: [u64; 7] = [
    0xa1bf,
    0xffff_fff8_0000_0107,
    0x0000_0008_0000_02b7,
    0x0000_0000_0000_03b7,
    0x0000_0071_0000_0085,
    0x0000_0000_0000_00b7,
    0x95,
];

/// `r0 = 1; exit`. Every kernel with socket hooks accepts it.
const ALLOW: [u64; 2] = [0x0000_0001_0000_00b7, 0x95];
