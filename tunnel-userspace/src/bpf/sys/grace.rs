//! Waits until every BPF program that is currently running has finished.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use super::{Attr, BPF_MAP_UPDATE_ELEM};
use crate::reconcile::GracePeriod;

const BPF_MAP_CREATE: i64 = 0;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_ARRAY_OF_MAPS: u32 = 12;

/// Waits for an RCU grace period by updating a map of maps: that system call returns only after every BPF
/// program that was running has finished (`maybe_wait_bpf_programs` in kernel/bpf/syscall.c). membarrier(2)
/// would return too early on a preemptible kernel.
#[derive(Debug)]
pub struct RcuGrace {
    /// A map with one entry, which is the map `inner`.
    outer: OwnedFd,
    inner: OwnedFd,
}

impl RcuGrace {
    /// Creates the maps.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't create the maps.
    pub fn new() -> io::Result<Self> {
        let array = |kind| Attr::new().u32(0, kind).u32(4, 4).u32(8, 4).u32(12, 1);
        // SAFETY: the attribute contains no pointers; the command returns a descriptor.
        let inner = unsafe { array(BPF_MAP_TYPE_ARRAY).call_for_fd(BPF_MAP_CREATE)? };
        let outer = array(BPF_MAP_TYPE_ARRAY_OF_MAPS).fd(20, inner.as_fd());
        // SAFETY: as above.
        let outer = unsafe { outer.call_for_fd(BPF_MAP_CREATE)? };
        Ok(Self { outer, inner })
    }
}

impl GracePeriod for RcuGrace {
    fn wait(&self) -> io::Result<()> {
        let (key, value) = (0_u32, self.inner.as_raw_fd());
        let mut attr = Attr::new()
            .fd(0, self.outer.as_fd())
            .pointer(8, &raw const key)
            .pointer(16, &raw const value);
        // SAFETY: key and value have four bytes, as declared when the map was created, and outlive the call.
        unsafe { attr.call(BPF_MAP_UPDATE_ELEM) }.map(drop)
    }
}
