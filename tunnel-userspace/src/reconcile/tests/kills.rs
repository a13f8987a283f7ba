//! Sequences of changes in which the process is killed between writes, or in which entries are freed late.

use std::collections::{BTreeMap, BTreeSet};

use litemap::LiteMap;
use proptest::prelude::*;

use super::{
    Memory, NoGrace, ROOMY, Reconciler, RetiredEntries, adopt, backends, free_retired, is_ready,
    settle, state, update,
};

/// One change: a Service's number, its VIP, and its endpoints, or `None` to delete the Service.
pub(super) type Step = (usize, u8, Option<BTreeSet<u8>>);

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

pub(super) fn history() -> impl Strategy<Value = Vec<Step>> {
    let endpoints =
        proptest::option::weighted(0.8, proptest::collection::btree_set(1..12_u8, 0..6));
    proptest::collection::vec((0..NAMES.len(), 1..4_u8, endpoints), 1..24)
}

pub(super) fn apply_step(reconciler: &mut Reconciler<Memory>, (name, vip, endpoints): &Step) {
    let name = NAMES[*name];
    let state = endpoints
        .as_ref()
        .map(|endpoints| state(name, *vip, endpoints));
    reconciler.update(update(vec![(name, state)]));
}

/// Returns the backends that each VIP must have in the end. If several Services have the same VIP, the first
/// one by name owns it.
fn expected_backends(history: &[Step]) -> BTreeMap<u8, Vec<u8>> {
    let last = history.iter().map(|(name, vip, it)| (name, (vip, it)));
    let last: BTreeMap<_, _> = last.collect();
    let wanted = last.into_values().rev().filter_map(|(vip, endpoints)| {
        let all = endpoints.as_ref()?.iter().copied();
        Some((*vip, all.filter(|last| is_ready(*vip, *last)).collect()))
    });
    wanted.collect()
}

pub(super) fn backends_by_vip(reconciler: &Reconciler<Memory>) -> BTreeMap<u8, Vec<u8>> {
    (1..4)
        .filter_map(|vip| Some((vip, backends(reconciler, vip)?)))
        .collect()
}

/// Applies a history in a process that is killed after `cut` writes, and then once more in a new process.
/// After each write, `Memory` checks that no frontend has a backend that belongs to another.
pub(super) fn restart_after_kill<T>(
    history: &[T],
    cut: usize,
    take: impl Fn(&mut Reconciler<Memory>, &T),
) -> Reconciler<Memory> {
    let mut first = adopt(Memory::new(ROOMY));
    first.sync.tracked.maps.max_writes = cut;
    for step in history {
        take(&mut first, step);
        let retired = first.write_changes();
        if first.maps().writes < cut {
            free_retired(&mut first, &retired);
        }
    }
    let mut maps = first.sync.tracked.maps;
    maps.max_writes = usize::MAX;
    let mut second = adopt(maps);
    for step in history {
        take(&mut second, step);
    }
    settle(&mut second);
    second
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_maps_are_as_planned_after_any_history_and_any_delay_of_freeing(
        history in history(),
        frees in proptest::collection::vec(any::<bool>(), 24),
    ) {
        let mut reconciler = adopt(Memory::new(ROOMY));
        let mut retired = RetiredEntries::default();
        for (step, frees) in history.iter().zip(frees) {
            apply_step(&mut reconciler, step);
            retired.0.extend(reconciler.write_changes().0);
            if frees {
                free_retired(&mut reconciler, &std::mem::take(&mut retired));
            }
        }
        free_retired(&mut reconciler, &retired);
        settle(&mut reconciler);
        prop_assert_eq!(backends_by_vip(&reconciler), expected_backends(&history));
        prop_assert_eq!(reconciler.maps().wrong_memberships(), Vec::<u32>::new());
        prop_assert_eq!(reconciler.audit(&NoGrace).expect("read"), 0);
    }

    #[test]
    fn a_kill_between_any_two_writes_is_repaired_by_the_next_start(
        history in history(),
        cut in 0..200_usize,
    ) {
        let second = restart_after_kill(&history, cut, apply_step);
        prop_assert_eq!(backends_by_vip(&second), expected_backends(&history));
        prop_assert_eq!(second.maps().wrong_memberships(), Vec::<u32>::new());
        let usage = second.sync.tracked.actual.usage();
        let backends: usize = second.desired.plans.values().flat_map(LiteMap::values)
            .filter(|plan| plan.frontends.keys().any(|key| second.desired.frontend_owners.owner(key)
                .is_some_and(|name| second.desired.plans[&name.service].get(name) == Some(*plan))))
            .map(|plan| plan.endpoints.len()).sum();
        prop_assert!(usize::try_from(usage.backends).expect("small") <= backends);
    }
}

#[test]
fn a_kill_at_any_write_of_a_long_history_is_repaired() {
    let set = |endpoints: &[u8]| Some(endpoints.iter().copied().collect::<BTreeSet<u8>>());
    let history: Vec<Step> = vec![
        (3, 1, set(&[1, 2])),
        (1, 1, set(&[1, 2, 3])),
        (0, 1, set(&[])),
        (0, 1, None),
        (0, 1, set(&[1, 2])),
        (3, 2, set(&[1, 2, 3, 6, 7])),
        (3, 2, set(&[4, 5, 8, 9])),
        (0, 1, set(&[])),
        (3, 1, None),
        (0, 2, set(&[1])),
    ];
    for cut in 0..120 {
        let second = restart_after_kill(&history, cut, apply_step);
        assert_eq!(
            backends_by_vip(&second),
            expected_backends(&history),
            "after {cut} writes"
        );
    }
}
