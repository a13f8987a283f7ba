//! The lookup of a record by its index in a hash, repeated while the record echoes another key.

use crate::{
    service::{Front, FrontKey},
    steering::{Steered, SteeringKey},
};

/// The number of lookups of a key before it counts as unstable.
pub const TRIES: u32 = 4;

/// A record that contains the key for which it was written.
pub trait Echo {
    /// The key of the hash that leads to such records.
    type Key: PartialEq;

    /// Returns the key for which the record was written.
    fn key(&self) -> &Self::Key;
}

impl Echo for Front {
    type Key = FrontKey;

    #[inline(always)]
    fn key(&self) -> &FrontKey {
        &self.key
    }
}

impl Echo for Steered {
    type Key = SteeringKey;

    #[inline(always)]
    fn key(&self) -> &SteeringKey {
        &self.key
    }
}

impl<R: Echo> Echo for &R {
    type Key = R::Key;

    #[inline(always)]
    fn key(&self) -> &R::Key {
        R::key(self)
    }
}

/// The outcome of a lookup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lookup<R> {
    /// The record of the key.
    Found(R),
    /// The key has no record.
    None,
    /// Every lookup read an index that was being replaced.
    Unstable,
}

/// Looks up the record of a key by its index, and repeats that if the record echoes another key: the
/// kernel reuses a replaced element of a hash at once, so a reader may get another key's index.
///
/// A key counts as absent only if a second lookup fails too: the kernel inserts the new element at the
/// head of its chain and then removes the old one, and a reader between the two sees neither.
///
/// # Errors
///
/// Those of `index_of` and `record_at`.
#[inline(always)]
pub fn look_up<R: Echo, E>(
    key: &R::Key,
    index_of: impl Fn(&R::Key) -> Result<Option<u32>, E>,
    record_at: impl Fn(u32) -> Result<Option<R>, E>,
) -> Result<Lookup<(u32, R)>, E> {
    // Bounded by TRIES for the verifier.
    for _ in 0..TRIES {
        let index = match index_of(key)? {
            Some(index) => index,
            None => match index_of(key)? {
                Some(index) => index,
                None => return Ok(Lookup::None),
            },
        };
        match record_at(index)? {
            Some(record) if record.key() == key => return Ok(Lookup::Found((index, record))),
            _ => {}
        }
    }
    Ok(Lookup::Unstable)
}

#[cfg(test)]
mod tests;
