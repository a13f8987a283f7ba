use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use super::sys;
use crate::reconcile::Grace;

/// Waits for a grace period of RCU by an update of a map-in-map, which the kernel ends only when
/// every program that ran before has ended. (membarrier(2) may return too early on a preemptible
/// kernel.)
#[derive(Debug)]
pub struct RcuGrace {
    outer: OwnedFd,
    inner: OwnedFd,
}

impl RcuGrace {
    /// Makes the map.
    ///
    /// # Errors
    ///
    /// The kernel gives no map.
    pub fn new() -> io::Result<Self> {
        let (outer, inner) = sys::create_map_in_map()?;
        Ok(Self { outer, inner })
    }
}

impl Grace for RcuGrace {
    fn wait(&self) -> io::Result<()> {
        sys::update_map_in_map(self.outer.as_fd(), self.inner.as_fd())
    }
}
