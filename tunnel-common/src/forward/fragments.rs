//! Decides how fragments are translated: the first one of a packet like a whole packet, and the others as the first one.
//!
//! A fragment that arrives before the first one of its packet is left alone, because it may be for a socket of this node. If
//! the packet is for a frontend, it is then lost.

use super::{Flows, Run, Step};
use crate::{
    fragment::{FragmentKey, FragmentRecord},
    packet::Packet,
};

/// The maps, as the programs need them for fragments.
pub trait Fragments: Flows {
    /// Returns the entry of the map `fragments` with this key. During a concurrent write, it may be another packet's.
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentRecord>;

    /// Inserts or replaces an entry of the map `fragments`.
    fn insert_fragment(&self, record: &FragmentRecord);

    /// Removes the entry of the map `fragments` with this key, if there is one.
    fn remove_fragment(&self, key: &FragmentKey);

    /// Returns the time for which fragments follow the first one of their packet, in seconds.
    fn fragment_timeout(&self) -> u32;
}

/// Stores the headers of a first fragment for [`follow`], and for the decision about the packet. An earlier packet may have had
/// the same key.
#[inline(always)]
pub fn start<T: Fragments>(maps: &T, key: &FragmentKey, packet: &Packet) {
    let now = maps.seconds();
    maps.with_run(|run| {
        run.start(packet, now);
        run.fragment = *key;
        maps.remove_fragment(&run.fragment);
    });
}

/// Makes the other fragments follow the first one, which has got the end in the run.
#[inline(always)]
pub fn follow<T: Fragments>(maps: &T) {
    maps.with_run(|run| {
        maps.insert_fragment(&FragmentRecord {
            key: run.fragment,
            address: run.replacement.address,
            time: run.now,
            reserved: 0,
        });
    });
}

/// Decides about a fragment other than the first. If it is translated, the address that it gets is that of
/// [`Run::replacement`].
#[inline(always)]
pub fn decide<T: Fragments>(maps: &T, key: &FragmentKey) -> Step {
    let now = maps.seconds();
    let step = maps.with_run(|run| {
        let Run {
            fragment,
            replacement,
            ..
        } = run;
        *fragment = *key;
        match maps.fragment(fragment) {
            Some(record) if record.is_valid(fragment, now, maps.fragment_timeout()) => {
                replacement.address = record.address;
                Step::Translate
            }
            _ => Step::Pass,
        }
    });
    super::or_pass(step)
}
