//! The maps of forwarded connections to edge nodes, as the input for [`steering`].
#![expect(unsafe_code, reason = "global functions")]

use aya_ebpf::{btf_maps::Array, macros::btf_map};
use tunnel_common::{
    forward::{Steering, steering},
    lookup::Lookup,
    service::SourceRange,
    steering::{SteeringKey, SteeringRecord},
};

use super::KernelMaps;
use crate::context;

#[btf_map(name = "forward_ranges")]
static FORWARD_RANGES: Array<SourceRange, 1> = Array::new();
impl Steering for KernelMaps {
    #[inline(always)]
    fn is_steering_enabled(&self) -> bool {
        context::is_steering_enabled()
    }

    #[inline(always)]
    fn steering_record(&self, key: &SteeringKey) -> Lookup<&SteeringRecord> {
        match crate::steering::find(key) {
            Lookup::Found((_, record)) => Lookup::Found(record),
            Lookup::None => Lookup::None,
            Lookup::Unstable => Lookup::Unstable,
        }
    }

    #[inline(always)]
    fn routed_families(&self) -> u64 {
        super::routed_families()
    }

    #[inline(always)]
    fn forwarded_range(&self, index: u32) -> Option<&SourceRange> {
        FORWARD_RANGES.get(index)
    }
}

/// Calls [`steering::steer`].
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn steer_packet() -> u32 {
    steering::steer(&KernelMaps).number()
}

/// Calls [`steering::may_be_forwarded`]. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn may_sender_be_forwarded() -> u32 {
    steering::may_be_forwarded(&KernelMaps).into()
}

/// Calls [`steering::relation_to_forwarded_range`].
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn relation_of_sender_to_forward_range(index: u32) -> u32 {
    steering::relation_to_forwarded_range(&KernelMaps, index)
}
