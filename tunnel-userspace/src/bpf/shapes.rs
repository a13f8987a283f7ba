//! The shapes of the pinned maps.

use tunnel_common::{
    affinity::{Affinity, AffinityKey},
    names,
    origin::{Origin, Overflow, OverflowKey},
    reason::Reason,
    service::{Backend, Front, FrontKey, Slot, Source, Tally},
    steering::{Steered, SteeringKey},
};

use super::sys::{self, Shape};
use crate::reconcile::{Sizes, without_spare};

const HASH: u32 = 1;
const ARRAY: u32 = 2;
const PERCPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const SK_STORAGE: u32 = 24;
const NO_PREALLOC: u32 = 1;
const NO_COMMON_LRU: u32 = 2;

/// The shape of a map of ours; its entries are 0 where the config decides.
pub(super) fn of_map(name: &str) -> Option<Shape> {
    let shape = |kind, key, value, entries, flags| Shape {
        kind,
        key,
        value,
        entries,
        flags,
    };
    Some(match name {
        names::SVC => shape(HASH, bytes::<FrontKey>(), 4, 0, 0),
        names::FRONT => shape(ARRAY, 4, bytes::<Front>(), 0, 0),
        names::SLOT => shape(ARRAY, 4, bytes::<Slot>(), 0, 0),
        names::SOURCE => shape(ARRAY, 4, bytes::<Source>(), 0, 0),
        names::BE => shape(ARRAY, 4, bytes::<Backend>(), 0, 0),
        names::CONNS => shape(ARRAY, 4, 8, 0, sys::MMAPABLE),
        names::TALLY => shape(ARRAY, 4, bytes::<Tally>(), 0, 0),
        names::ORIGIN => shape(SK_STORAGE, 4, bytes::<Origin>(), 0, NO_PREALLOC),
        names::OVERFLOW => shape(
            LRU_HASH,
            bytes::<OverflowKey>(),
            bytes::<Overflow>(),
            0,
            NO_COMMON_LRU,
        ),
        names::AFFINITY => shape(LRU_HASH, bytes::<AffinityKey>(), bytes::<Affinity>(), 0, 0),
        names::STEER => shape(HASH, bytes::<SteeringKey>(), 4, 0, 0),
        names::STEERED => shape(ARRAY, 4, bytes::<Steered>(), 0, 0),
        names::HOST => shape(ARRAY, 4, 8, 2, 0),
        names::COUNT => shape(PERCPU_ARRAY, 4, 8, Reason::CAPACITY, 0),
        _ => return None,
    })
}

/// How many entries each map whose size the config decides is made with.
pub(super) const fn entries(sizes: Sizes) -> [(&'static str, u32); 10] {
    [
        (names::SVC, sizes.fronts),
        (names::FRONT, sizes.front_entries()),
        (names::SLOT, sizes.slot_entries()),
        (names::SOURCE, sizes.source_entries()),
        (names::BE, sizes.backend_entries()),
        (names::CONNS, sizes.backend_entries()),
        (names::TALLY, sizes.front_entries()),
        (names::STEER, sizes.steer_entries()),
        (names::STEERED, sizes.steered_entries()),
        (names::AFFINITY, sizes.affinity),
    ]
}

/// The sizes that pinned maps were made with. `front` and its like are larger than what they give
/// room for by a rule that can be turned round.
pub(super) fn sizes_of(entries: impl Fn(&str) -> Option<u32>) -> Option<Sizes> {
    Some(Sizes {
        fronts: entries(names::SVC)?,
        slots: without_spare(entries(names::SLOT)?),
        sources: without_spare(entries(names::SOURCE)?),
        backends: without_spare(entries(names::BE)?),
        steering: steering_of(entries(names::STEER)?),
        affinity: entries(names::AFFINITY)?,
    })
}

/// How many are steered, from the entries of `steer`: one is for the daemon's probe.
pub(super) const fn steering_of(entries: u32) -> u32 {
    entries.saturating_sub(1)
}

fn bytes<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX)
}
