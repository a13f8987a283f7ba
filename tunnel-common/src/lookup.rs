//! The look-up of a record by an index in a hash, with the rule "look again where the echo differs".

use crate::{
    service::{Front, FrontKey},
    steering::{Steered, SteeringKey},
};

/// How often a key is looked up whose index leads to another key's record.
pub const TRIES: u32 = 4;

/// A record that says which key it was written for.
pub trait Echo {
    /// The key of the hash that leads to such records.
    type Key: PartialEq;

    /// The key that it was written for.
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

/// The outcome of a look-up.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lookup<R> {
    /// The record of the key.
    Found(R),
    /// The key has no record.
    None,
    /// Each try met an index that was being replaced.
    Unstable,
}

/// Looks up the record of a key by an index, and again where the record echoes another key: an element
/// of a hash that is replaced is reused at once, so that its reader may be given another key's index.
///
/// A key counts as absent when a second look doesn't find it either: the kernel puts a new element at
/// the head of its chain and then takes the old one out, and a reader between the two meets neither.
///
/// # Errors
///
/// Those of the tables.
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
