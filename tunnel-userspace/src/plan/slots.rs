//! The number and order of a backend's slots in a set. The programs know no weights: a backend of
//! greater weight has more slots.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::select;

use super::Target;
use crate::model::Algorithm;

/// Returns the slots of a set.
///
/// If every backend has a weight of 0, the weights are ignored: there is no other backend.
pub(super) fn of_set(
    algorithm: Algorithm,
    targets: &BTreeSet<Target>,
    weights: &BTreeMap<Target, u32>,
) -> Vec<Target> {
    let weigh = |target: &Target| (*target, weights.get(target).copied().unwrap_or(1));
    let wanted = targets.iter().map(weigh);
    let mut weighted: Vec<_> = wanted.filter(|(_, weight)| *weight > 0).collect();
    if weighted.is_empty() {
        weighted = targets.iter().map(|target| (*target, 1)).collect();
    }
    match algorithm {
        Algorithm::Maglev => maglev(&weighted),
        Algorithm::Random
        | Algorithm::RoundRobin
        | Algorithm::SourceHash
        | Algorithm::DestinationHash
        | Algorithm::LeastConn => spread(&weighted),
    }
}

/// Returns each backend as often as its weight says, spread evenly, so that round-robin makes no bursts.
/// Weights are divided by their greatest common divisor.
fn spread(weighted: &[(Target, u32)]) -> Vec<Target> {
    let divisor = weighted
        .iter()
        .fold(0, |sum, (_, weight)| gcd(sum, *weight));
    if divisor == 0 || weighted.iter().all(|(_, weight)| *weight == divisor) {
        return weighted.iter().map(|(target, _)| *target).collect();
    }
    // The k-th turn of a backend with weight w is due at (2k + 1) / 2w of a round. Equal times are in
    // the order of the backends, which a stable sort keeps.
    let mut turns: Vec<(u64, u64, Target)> = Vec::new();
    for (target, weight) in weighted {
        let weight = u64::from(weight / divisor);
        let due = (0..weight).map(|turn| 2 * turn + 1);
        turns.extend(due.map(|due| (due, weight, *target)));
    }
    turns.sort_by(|(due, weight, _), (other_due, other_weight, _)| {
        (due * other_weight).cmp(&(other_due * weight))
    });
    turns.into_iter().map(|(_, _, target)| target).collect()
}

const fn gcd(mut a: u32, mut b: u32) -> u32 {
    while let Some(rest) = a.checked_rem(b) {
        (a, b) = (b, rest);
    }
    a
}

/// The sizes of Maglev tables: the largest prime below each power of two.
const TABLES: [usize; 7] = [251, 509, 1_021, 2_039, 4_093, 8_191, 16_381];

/// The minimum number of slots of a backend, if the largest table has room for that; then no backend
/// gets more than about a hundredth above its share.
const SLOTS_EACH: usize = 100;

/// Returns a Maglev table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
/// Balancer", NSDI 2016, section 3.4): each backend in turn takes the next free slot of its own
/// permutation. A backend of less weight skips some of its turns.
fn maglev(weighted: &[(Target, u32)]) -> Vec<Target> {
    if weighted.len() <= 1 {
        return weighted.iter().map(|(target, _)| *target).collect();
    }
    let wanted = weighted.len() * SLOTS_EACH;
    let [.., largest] = TABLES;
    let size = TABLES.into_iter().find(|size| *size >= wanted);
    let size = size.unwrap_or(largest);
    let most = weighted.iter().map(|(_, weight)| *weight).max();
    let most = most.unwrap_or(1);
    let mut walks: Vec<_> = weighted.iter().map(|one| Walk::of(one, size)).collect();
    let mut table: Vec<Option<Target>> = vec![None; size];
    let mut free = size;
    while free > 0 {
        for walk in &mut walks {
            if free == 0 {
                break;
            }
            walk.credit += walk.weight;
            if walk.credit < most {
                continue;
            }
            walk.credit -= most;
            if let Some(slot) = walk.next_free(&mut table) {
                *slot = Some(walk.target);
                free -= 1;
            }
        }
    }
    table.into_iter().flatten().collect()
}

/// The position of a backend in its permutation of the table.
struct Walk {
    target: Target,
    weight: u32,
    credit: u32,
    at: usize,
    skip: usize,
}

impl Walk {
    fn of((target, weight): &(Target, u32), size: usize) -> Self {
        let number = |salt: u32| {
            let [a, b, c, d] = target.address.words();
            let hash = select::hash(&[a, b, c, d, u32::from(target.port.to_host()), salt]);
            usize::try_from(hash).unwrap_or(0)
        };
        Self {
            target: *target,
            weight: *weight,
            credit: 0,
            at: number(0) % size,
            // At least 1 and less than the size, a prime, so that the walk visits every slot.
            skip: 1 + number(1) % (size - 1),
        }
    }

    /// Returns the next free slot of the permutation; none if the table is full.
    fn next_free<'a>(&mut self, table: &'a mut [Option<Target>]) -> Option<&'a mut Option<Target>> {
        let size = table.len();
        for _ in 0..size {
            let at = self.at;
            self.at = (at + self.skip) % size;
            if table.get(at)?.is_none() {
                return table.get_mut(at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
