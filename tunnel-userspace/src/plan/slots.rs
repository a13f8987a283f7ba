//! Distributes the slots of a backend set among its backends. A backend with a greater weight gets more
//! slots, so that the BPF programs need no weights.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::select;

use super::BackendTarget;
use crate::model::Algorithm;

/// Returns the backend for each slot in a set. If all backends have weight 0, the weights are ignored.
pub(super) fn distribute_slots(
    algorithm: Algorithm,
    targets: &BTreeSet<BackendTarget>,
    weights: &BTreeMap<BackendTarget, u32>,
) -> Vec<BackendTarget> {
    let weigh = |target: &BackendTarget| (*target, weights.get(target).copied().unwrap_or(1));
    let wanted = targets.iter().map(weigh);
    let mut weighted: Vec<_> = wanted.filter(|(_, weight)| *weight > 0).collect();
    if weighted.is_empty() {
        weighted = targets.iter().map(|target| (*target, 1)).collect();
    }
    match algorithm {
        Algorithm::Maglev => maglev_table(&weighted),
        Algorithm::Random
        | Algorithm::RoundRobin
        | Algorithm::SourceHash
        | Algorithm::DestinationHash
        | Algorithm::LeastConn => spread_by_weight(&weighted),
    }
}

/// Gives each backend as many slots as its weight, after dividing the weights by their greatest common
/// divisor. A backend's slots are spread evenly, so that round-robin doesn't send it bursts of connections.
fn spread_by_weight(weighted: &[(BackendTarget, u32)]) -> Vec<BackendTarget> {
    let divisor = weighted
        .iter()
        .fold(0, |sum, (_, weight)| gcd(sum, *weight));
    if divisor == 0 || weighted.iter().all(|(_, weight)| *weight == divisor) {
        return weighted.iter().map(|(target, _)| *target).collect();
    }
    // Slot k of a backend with weight w has the ideal position (2k + 1) / 2w, between 0 and 1. The sort is
    // stable, so that backends with equal positions stay in order.
    let mut turns: Vec<(u64, u64, BackendTarget)> = Vec::new();
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

/// The sizes of Maglev tables: the largest prime below each power of two from 256 to 16384.
const TABLE_SIZES: [usize; 7] = [251, 509, 1_021, 2_039, 4_093, 8_191, 16_381];

/// The minimum number of slots per backend, unless the largest table is too small for that. With this many
/// slots, a backend's share is at most about 1 % too large.
const SLOTS_PER_BACKEND: usize = 100;

/// Computes a Maglev table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer",
/// NSDI 2016, section 3.4): the backends take turns, each taking the next free slot in its own permutation. A
/// backend with a smaller weight skips some turns.
fn maglev_table(weighted: &[(BackendTarget, u32)]) -> Vec<BackendTarget> {
    if weighted.len() <= 1 {
        return weighted.iter().map(|(target, _)| *target).collect();
    }
    let wanted = weighted.len() * SLOTS_PER_BACKEND;
    let [.., largest] = TABLE_SIZES;
    let size = TABLE_SIZES.into_iter().find(|size| *size >= wanted);
    let size = size.unwrap_or(largest);
    let most = weighted.iter().map(|(_, weight)| *weight).max();
    let most = most.unwrap_or(1);
    let mut permutations: Vec<_> = weighted
        .iter()
        .map(|one| Permutation::of(one, size))
        .collect();
    let mut table: Vec<Option<BackendTarget>> = vec![None; size];
    let mut free = size;
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
                *slot = Some(permutation.target);
                free -= 1;
            }
        }
    }
    table.into_iter().flatten().collect()
}

/// A backend, and its current position in its permutation of the table's slots.
struct Permutation {
    target: BackendTarget,
    weight: u32,
    credit: u32,
    position: usize,
    skip: usize,
}

impl Permutation {
    fn of((target, weight): &(BackendTarget, u32), size: usize) -> Self {
        let hash = |salt: u32| {
            let [a, b, c, d] = target.address.words();
            let hash = select::hash(&[a, b, c, d, u32::from(target.port.to_host()), salt]);
            usize::try_from(hash).unwrap_or(0)
        };
        Self {
            target: *target,
            weight: *weight,
            credit: 0,
            position: hash(0) % size,
            // Greater than 0 and less than the size. Since the size is prime, the permutation contains every
            // slot.
            skip: 1 + hash(1) % (size - 1),
        }
    }

    /// Returns the next free slot in the permutation; `None` if the table is full.
    fn next_free<'a>(
        &mut self,
        table: &'a mut [Option<BackendTarget>],
    ) -> Option<&'a mut Option<BackendTarget>> {
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
