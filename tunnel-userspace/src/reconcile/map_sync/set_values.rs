//! The map values that represent backend sets: the slots, and the copies of backends in frontend records.

use foldhash::{HashMap, HashMapExt as _};
use tunnel_common::service::{InlineBackend, MAX_INLINE_BACKENDS, Slot};

use crate::plan::BackendTarget;

/// The maximum number of slots for which it is faster to count each backend's slots separately than to build
/// a hash map.
const FEW: usize = 16;

/// Returns a set's slots. `backends` contains the backend index for each slot.
pub(in crate::reconcile) fn slots(backends: &[u32]) -> impl Iterator<Item = Slot> {
    let mut shares: HashMap<u32, u32> = HashMap::new();
    let looked_up = if backends.len() > FEW { backends } else { &[] };
    for backend in looked_up {
        *shares.entry(*backend).or_default() += 1;
    }
    let count = |backend: &u32| backends.iter().filter(|other| *other == backend).count();
    let slot = move |backend: &u32| Slot {
        backend: *backend,
        share: match shares.get(backend) {
            Some(share) => *share,
            None => u32::try_from(count(backend)).unwrap_or(u32::MAX),
        },
    };
    backends.iter().map(slot)
}

/// Returns the copies of a small set's backends to store in a frontend record. `indices` contains the backend
/// index of each target.
pub(super) fn inline_backends(
    targets: &[BackendTarget],
    indices: &[u32],
) -> [InlineBackend; MAX_INLINE_BACKENDS] {
    let mut inline = [InlineBackend::NONE; MAX_INLINE_BACKENDS];
    let backends = targets.iter().zip(slots(indices));
    for (entry, (target, slot)) in inline.iter_mut().zip(backends) {
        *entry = InlineBackend {
            address: target.address,
            port: target.port,
            share: u16::try_from(slot.share).unwrap_or(u16::MAX),
            index: slot.backend,
        };
    }
    inline
}
