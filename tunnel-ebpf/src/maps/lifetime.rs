//! The steps that decide how long a flow lasts, as global functions.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use tunnel_common::{
    flow::Role,
    forward::{lifetime, steps},
};

use super::KernelMaps;

/// Calls [`lifetime::is_over`]. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn is_flow_over() -> u32 {
    lifetime::is_over(&KernelMaps).into()
}

/// Calls [`lifetime::is_moved`]. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn is_frontend_moved() -> u32 {
    lifetime::is_moved(&KernelMaps).into()
}

/// Calls [`lifetime::proven`].
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn proven_events() -> u32 {
    lifetime::proven(&KernelMaps).number()
}

/// Calls [`steps::end_others`]. The number that it returns has no meaning.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn end_other_entries() -> u32 {
    steps::end_others(&KernelMaps);
    0
}

/// Calls [`steps::end_entry`]. The number that it returns has no meaning.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn end_flow_entry(role: u32) -> u32 {
    steps::end_entry(&KernelMaps, Role::from_number(role));
    0
}
