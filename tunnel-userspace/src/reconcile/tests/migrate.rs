//! What maps hold, in maps of other sizes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tunnel_common::service::State;

use super::{
    super::{Misfit, ServiceSnapshot, write_unused},
    Memory, ROOMY, Sizes, adopt, apply,
    histories::{found, history, killed_after, take},
    serving, set, settle,
};

/// The state in which an index begins that the old maps did not have.
fn unused() -> State {
    State::unused_since(1000)
}

/// The same in maps of these sizes.
fn migrate(from: &Memory, sizes: Sizes) -> Result<Memory, Misfit> {
    let snapshot = ServiceSnapshot::read(from, from.sizes).expect("read");
    snapshot.fits(sizes)?;
    let mut to = Memory::new(sizes);
    snapshot
        .write(from, &mut to, sizes, unused())
        .expect("written");
    Ok(to)
}

/// The smallest sizes that a memory's contents fit into.
fn smallest(from: &Memory) -> Sizes {
    let mut sizes = Sizes {
        fronts: 0,
        slots: 0,
        backends: 0,
        ..Sizes::each(64)
    };
    while let Err(Misfit { size, needed, .. }) = migrate(from, sizes) {
        match size {
            "fronts" => sizes.fronts = needed,
            "slots" => sizes.slots = needed,
            _ => sizes.backends = needed,
        }
    }
    sizes
}

/// What sockets may remember: the indices and states of backends that serve, and their owners.
fn remembered(maps: &Memory) -> BTreeMap<u32, (u32, State)> {
    let serving = maps
        .be
        .iter()
        .filter(|(_, backend)| backend.state.is_serving());
    serving
        .map(|(index, backend)| (*index, (backend.service, backend.state)))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_maps_hold_is_the_same_in_larger_ones_and_in_the_smallest(
        history in history(),
        cut in 0..400_usize,
        more in 0..100_u32,
    ) {
        let first = killed_after(&history, cut);
        let small = smallest(&first.sync.ports.maps);
        let sizes = Sizes {
            fronts: small.fronts + more,
            slots: small.slots + more,
            backends: small.backends + more,
            ..Sizes::each(64)
        };
        let migrated = migrate(&first.sync.ports.maps, sizes).expect("it fits");
        prop_assert_eq!(remembered(&migrated), remembered(&first.sync.ports.maps));

        let mut second = adopt(migrated);
        prop_assert_eq!(found(&second), found(&first));
        prop_assert_eq!(second.sync.drift, 0);
        let before = second.maps().writes;
        history.iter().for_each(|step| take(&mut second, step));
        settle(&mut second);
        prop_assert_eq!(found(&second), found(&first));
        prop_assert_eq!(second.maps().writes, before);
    }
}

#[test]
fn an_index_that_was_in_use_goes_on_from_its_last_use_and_a_new_one_from_nobodys() {
    let mut first = serving(ROOMY, [set("a", 1, &[1, 2]), set("b", 2, &[3])]);
    apply(&mut first, vec![set("a", 1, &[]), set("b", 2, &[3])]);
    let old = first.maps().sizes.backend_entries();
    let gone = first.maps().be[&0].state;
    assert!(!gone.is_serving());

    let sizes = Sizes {
        backends: 512,
        ..ROOMY
    };
    let migrated = migrate(&first.sync.ports.maps, sizes).expect("it fits");

    assert_eq!(migrated.be[&0].state, gone);
    assert_eq!(migrated.be[&old].state, unused());
    assert_eq!(migrated.be[&(sizes.backend_entries() - 1)].state, unused());
    assert!(!migrated.be.contains_key(&(old - 1)));
}

#[test]
fn maps_that_begin_with_nothing_use_no_index_as_an_older_layout_may_have() {
    let mut maps = Memory::new(ROOMY);
    write_unused(&mut maps, 0, ROOMY, unused()).expect("written");
    let mut reconciler = adopt(maps);

    apply(&mut reconciler, vec![set("a", 1, &[1])]);

    assert_eq!(reconciler.maps().be[&0].state, unused().next_use());
}

#[test]
fn each_size_that_is_too_small_is_named_with_what_is_needed() {
    let mut first = adopt(Memory::new(ROOMY));
    // The indices of what stays are higher than there would be room for.
    let crowd: Vec<u8> = (1..=120).collect();
    apply(&mut first, vec![set("crowd", 1, &crowd)]);
    apply(
        &mut first,
        vec![set("a", 2, &[1, 2, 3, 4]), set("b", 3, &[5])],
    );
    apply(&mut first, vec![("crowd", None)]);

    let refused = |sizes| migrate(&first.sync.ports.maps, sizes).expect_err("it doesn't fit");
    let misfit = |size, wanted, needed| Misfit {
        size,
        wanted,
        needed,
    };
    assert_eq!(
        refused(Sizes { fronts: 1, ..ROOMY }),
        misfit("fronts", 1, 2)
    );
    assert_eq!(refused(Sizes { slots: 4, ..ROOMY }), misfit("slots", 4, 5));
    // 125 places, of which 64 and an eighth are beyond the size.
    let small = Sizes {
        backends: 54,
        ..ROOMY
    };
    assert_eq!(refused(small), misfit("backends", 54, 55));
    assert!(small.backend_entries() < 125);
    let enough = Sizes {
        backends: 55,
        ..ROOMY
    };
    assert!(enough.backend_entries() >= 125);
    migrate(&first.sync.ports.maps, enough).expect("it fits");
}

#[test]
fn what_makes_no_sense_is_left_behind() {
    let first = serving(ROOMY, [set("a", 1, &[1]), set("b", 2, &[2])]);
    let mut maps = first.sync.ports.maps;
    // The record of `b` is another key's.
    let index = maps.svc[&super::vip(2)];
    maps.front.get_mut(&index).expect("a record").key = super::vip(9);
    maps.writes = 0;

    let migrated = migrate(&maps, ROOMY).expect("it fits");

    assert!(migrated.svc.contains_key(&super::vip(1)));
    assert!(!migrated.svc.contains_key(&super::vip(2)));
    assert_eq!(remembered(&migrated).len(), 1);
}
