//! Looks up a record by way of a hash map that holds its index, and retries while the record found belongs to
//! another key.

use crate::{
    service::{Frontend, FrontendKey},
    steering::{SteeringKey, SteeringRecord},
};

/// The maximum number of attempts to look up a key.
pub const MAX_ATTEMPTS: u32 = 4;

/// A record that contains the key for which it was written.
pub trait Echo {
    /// The type of the key.
    type Key: PartialEq;

    /// Returns the key for which the record was written.
    fn key(&self) -> &Self::Key;
}

impl Echo for Frontend {
    type Key = FrontendKey;

    #[inline(always)]
    fn key(&self) -> &FrontendKey {
        &self.key
    }
}

impl Echo for SteeringRecord {
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

/// The result of a lookup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lookup<R> {
    /// The record for the key.
    Found(R),
    /// There is no record for the key.
    None,
    /// Every attempt found another key's record, because the hash kept changing.
    Unstable,
}

/// Looks up the record for a key, and retries if the record found belongs to another key. The kernel reuses a
/// replaced hash element at once, so a reader may get another key's index.
///
/// A key counts as absent only if two lookups in a row find nothing. To replace an element, the kernel
/// inserts the new one at the head of the chain and then removes the old one, so a concurrent reader may see
/// neither.
///
/// # Errors
///
/// Returns an error if `index_of` or `record_at` does.
#[inline(always)]
pub fn look_up<R: Echo, E>(
    key: &R::Key,
    index_of: impl Fn(&R::Key) -> Result<Option<u32>, E>,
    record_at: impl Fn(u32) -> Result<Option<R>, E>,
) -> Result<Lookup<(u32, R)>, E> {
    // MAX_ATTEMPTS bounds the loop, as the verifier requires.
    for _ in 0..MAX_ATTEMPTS {
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
