//! Distributes the slots of a backend set among its backends. A backend with a greater weight gets more
//! slots, so that the BPF programs need no weights. Plans contain no slots, because a Maglev table has up to
//! 16,381 of them: the reconciler computes a set's slots when it writes the set.

use tunnel_common::{select, service::Algorithm};

use super::BackendTarget;

/// A member of a backend set: an endpoint and its weight, which is greater than 0.
pub type WeightedTarget = (BackendTarget, u32);

/// The layout of a backend set's slots.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SlotLayout {
    /// One slot for each backend, in order.
    Plain,
    /// As many slots for each backend as its weight, divided by the weights' greatest common divisor.
    Weighted,
    /// A Maglev table.
    Maglev,
}

impl SlotLayout {
    /// Returns the layout that an algorithm and the members' weights require. If one slot for each member is
    /// equivalent, the layout is plain.
    #[must_use]
    pub fn required(algorithm: Algorithm, members: &[WeightedTarget]) -> Self {
        let mut weights = members.iter().map(|(_, weight)| *weight);
        let first = weights.next();
        if members.len() <= 1 {
            Self::Plain
        } else if algorithm == Algorithm::MAGLEV {
            Self::Maglev
        } else if weights.all(|weight| Some(weight) == first) {
            Self::Plain
        } else {
            Self::Weighted
        }
    }

    /// Returns how many slots a set with these members has, without computing the slots.
    #[must_use]
    pub fn slot_count(self, members: &[WeightedTarget]) -> usize {
        match self {
            Self::Plain => members.len(),
            Self::Weighted => {
                let divisor = common_divisor(members);
                let slots = members.iter().map(|(_, weight)| weight / divisor);
                slots.fold(0, |sum, slots| sum + usize::try_from(slots).unwrap_or(0))
            }
            Self::Maglev => table_size(members.len()),
        }
    }

    /// Returns how many slots a Maglev table with this number of members has.
    #[must_use]
    pub fn maglev_slots(members: usize) -> usize {
        table_size(members)
    }

    /// Returns, for each slot, the position of its backend among the members.
    #[must_use]
    pub fn distribute(self, members: &[WeightedTarget]) -> Vec<usize> {
        match self {
            Self::Plain => (0..members.len()).collect(),
            Self::Weighted => spread_by_weight(members),
            Self::Maglev => maglev_table(members),
        }
    }
}

/// Returns the greatest common divisor of the members' weights, or 1 if there are no members.
fn common_divisor(members: &[WeightedTarget]) -> u32 {
    let weights = members.iter().map(|(_, weight)| *weight);
    weights.fold(0, gcd).max(1)
}

/// Gives each backend as many slots as its weight, after dividing the weights by their greatest common
/// divisor. A backend's slots are spread evenly, so that round-robin doesn't send it bursts of connections.
fn spread_by_weight(members: &[WeightedTarget]) -> Vec<usize> {
    let divisor = common_divisor(members);
    // Slot k of a backend with weight w has the ideal position (2k + 1) / 2w, between 0 and 1. The sort is
    // stable, so that backends with equal positions stay in order.
    let mut turns: Vec<(u64, u64, usize)> = Vec::new();
    for (member, (_, weight)) in members.iter().enumerate() {
        let weight = u64::from(weight / divisor);
        let due = (0..weight).map(|turn| 2 * turn + 1);
        turns.extend(due.map(|due| (due, weight, member)));
    }
    turns.sort_by(|(due, weight, _), (other_due, other_weight, _)| {
        (due * other_weight).cmp(&(other_due * weight))
    });
    turns.into_iter().map(|(_, _, member)| member).collect()
}

const fn gcd(mut a: u32, mut b: u32) -> u32 {
    while let Some(rest) = a.checked_rem(b) {
        (a, b) = (b, rest);
    }
    a
}

/// The sizes of Maglev tables: the largest prime below each power of two from 256 to 16384.
const TABLE_SIZES: [usize; 7] = [251, 509, 1_021, 2_039, 4_093, 8_191, 16_381];

/// The minimum number of slots per backend, unless the largest table is too small for that. With this many
/// slots, a backend's share is at most about 1 % too large.
const SLOTS_PER_BACKEND: usize = 100;

/// Returns the size of the Maglev table for this many backends.
fn table_size(backends: usize) -> usize {
    let wanted = backends.saturating_mul(SLOTS_PER_BACKEND);
    let [.., largest] = TABLE_SIZES;
    let size = TABLE_SIZES.into_iter().find(|size| *size >= wanted);
    size.unwrap_or(largest)
}

/// Computes a Maglev table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer",
/// NSDI 2016, section 3.4): the backends take turns, each taking the next free slot in its own permutation. A
/// backend with a smaller weight skips some turns.
fn maglev_table(members: &[WeightedTarget]) -> Vec<usize> {
    let size = table_size(members.len());
    let most = members.iter().map(|(_, weight)| *weight).max();
    let most = most.unwrap_or(1);
    let mut permutations: Vec<_> = members
        .iter()
        .enumerate()
        .map(|(member, one)| Permutation::of(member, one, size))
        .collect();
    let mut table: Vec<Option<usize>> = vec![None; size];
    let mut free = if members.is_empty() { 0 } else { size };
    while free > 0 {
        for permutation in &mut permutations {
            if free == 0 {
                break;
            }
            permutation.credit += permutation.weight;
            if permutation.credit < most {
                continue;
            }
            permutation.credit -= most;
            if let Some(slot) = permutation.next_free(&mut table) {
                *slot = Some(permutation.member);
                free -= 1;
            }
        }
    }
    table.into_iter().flatten().collect()
}

/// A backend, and its current position in its permutation of the table's slots.
struct Permutation {
    /// The position of the backend among the set's members.
    member: usize,
    weight: u32,
    credit: u32,
    position: usize,
    skip: usize,
}

impl Permutation {
    fn of(member: usize, (target, weight): &WeightedTarget, size: usize) -> Self {
        let hash = |salt: u32| {
            let [a, b, c, d] = target.address.words();
            let hash = select::hash(&[a, b, c, d, u32::from(target.port.to_host()), salt]);
            usize::try_from(hash).unwrap_or(0)
        };
        Self {
            member,
            weight: *weight,
            credit: 0,
            position: hash(0) % size,
            // Greater than 0 and less than the size. Since the size is prime, the permutation contains every
            // slot.
            skip: 1 + hash(1) % (size - 1),
        }
    }

    /// Returns the next free slot in the permutation; `None` if the table is full.
    fn next_free<'a>(&mut self, table: &'a mut [Option<usize>]) -> Option<&'a mut Option<usize>> {
        let size = table.len();
        for _ in 0..size {
            let at = self.position;
            self.position = (at + self.skip) % size;
            if table.get(at)?.is_none() {
                return table.get_mut(at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
