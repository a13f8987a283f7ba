//! Migration to maps of different sizes.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tunnel_common::service::BackendState;

use super::{
    super::{MapTooSmall, ServiceMapsSnapshot, write_unused_backends},
    MapSize, MapSizes, Memory, ROOMY, adopt, apply,
    kills::{apply_step, backends_by_vip, history, restart_after_kill},
    serving, set, settle, vip,
};

/// Returns the initial state for backend indices that the old maps did not have.
fn unused() -> BackendState {
    BackendState::initial_at(1000)
}

/// Copies the contents of maps into new maps of the given sizes.
pub(super) fn migrate(from: &Memory, sizes: MapSizes) -> Result<Memory, MapTooSmall> {
    let snapshot = ServiceMapsSnapshot::read(from, from.sizes).expect("read");
    snapshot.fits(sizes)?;
    let mut to = Memory::new(sizes);
    snapshot
        .write(from, &mut to, sizes, unused())
        .expect("written");
    Ok(to)
}

/// Returns the smallest map sizes that the contents of the given maps fit into.
fn smallest_sizes(from: &Memory) -> MapSizes {
    let mut sizes = MapSizes::uniform(0);
    while let Err(MapTooSmall { size, needed, .. }) = migrate(from, sizes) {
        let mut all = MapSize::ALL.into_iter();
        let small = all.find(|it| it.key() == size).expect("a size");
        sizes = sizes.with(small, needed);
    }
    sizes
}

/// Returns the numbers that sockets may have stored: each serving backend's index, service port id and state.
fn stored_in_sockets(maps: &Memory) -> BTreeMap<u32, (u32, BackendState)> {
    let serving = maps.backends.iter().filter(|(_, it)| it.state.is_serving());
    let known = serving.map(|(index, it)| (*index, (it.service, it.state)));
    known.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_migration_to_any_sufficient_size_keeps_the_content(
        history in history(),
        cut in 0..400_usize,
        more in 0..100_u32,
    ) {
        let first = restart_after_kill(&history, cut, apply_step);
        let small = smallest_sizes(&first.sync.tracked.maps);
        let grown = |sizes: MapSizes, size| sizes.with(size, sizes.of(size) + more);
        let sizes = MapSize::ALL.into_iter().fold(small, grown);
        let migrated = migrate(&first.sync.tracked.maps, sizes).expect("it fits");
        prop_assert_eq!(stored_in_sockets(&migrated), stored_in_sockets(&first.sync.tracked.maps));

        let mut second = adopt(migrated);
        prop_assert_eq!(backends_by_vip(&second), backends_by_vip(&first));
        prop_assert_eq!(second.sync.drift, 0);
        let before = second.maps().writes;
        history.iter().for_each(|step| apply_step(&mut second, step));
        settle(&mut second);
        prop_assert_eq!(backends_by_vip(&second), backends_by_vip(&first));
        prop_assert_eq!(second.maps().writes, before);
    }
}

#[test]
fn a_migration_keeps_the_state_of_used_indices_and_initialises_new_ones() {
    let mut first = serving(ROOMY, [set("a", 1, &[1, 2]), set("b", 2, &[3])]);
    apply(&mut first, vec![set("a", 1, &[])]);
    let old = first.maps().sizes.backend_entries();
    let removed = first.maps().backends[&0].state;
    assert!(!removed.is_serving());

    let sizes = ROOMY.with(MapSize::Backends, 512);
    let migrated = migrate(&first.sync.tracked.maps, sizes).expect("it fits");

    assert_eq!(migrated.backends[&0].state, removed);
    assert_eq!(migrated.backends[&old].state, unused());
    assert_eq!(
        migrated.backends[&(sizes.backend_entries() - 1)].state,
        unused()
    );
    assert!(!migrated.backends.contains_key(&(old - 1)));
}

#[test]
fn new_maps_start_with_states_that_no_older_layout_has_used() {
    let mut maps = Memory::new(ROOMY);
    write_unused_backends(&mut maps, 0, ROOMY, unused()).expect("written");
    let mut reconciler = adopt(maps);

    apply(&mut reconciler, vec![set("a", 1, &[1])]);

    assert_eq!(
        reconciler.maps().backends[&0].state,
        unused().next_generation()
    );
}

#[test]
fn a_too_small_size_is_reported_with_the_needed_one() {
    // The remaining backends have higher indices than their number would require.
    let crowd: Vec<u8> = (1..=120).collect();
    let mut first = serving(ROOMY, [set("crowd", 1, &crowd)]);
    let stays = vec![set("a", 2, &[1, 2, 3, 4]), set("b", 3, &[5])];
    apply(&mut first, stays);
    apply(&mut first, vec![("crowd", None)]);

    // The smallest size whose array contains the highest index is 55.
    assert!(ROOMY.with(MapSize::Backends, 54).backend_entries() < 125);
    assert!(ROOMY.with(MapSize::Backends, 55).backend_entries() >= 125);
    for (size, needed) in [
        (MapSize::Frontends, 2),
        (MapSize::Slots, 5),
        (MapSize::Backends, 55),
    ] {
        let to = |number| migrate(&first.sync.tracked.maps, ROOMY.with(size, number));
        let misfit = MapTooSmall {
            size: size.key(),
            wanted: needed - 1,
            needed,
        };
        assert_eq!(to(needed - 1).expect_err("it doesn't fit"), misfit);
        to(needed).expect("it fits");
    }
}

#[test]
fn a_migration_leaves_out_invalid_entries() {
    let first = serving(ROOMY, [set("a", 1, &[1]), set("b", 2, &[2])]);
    let mut maps = first.sync.tracked.maps;
    // Change the key in the record for `b`'s frontend.
    let index = maps.frontend_keys[&vip(2)];
    maps.frontends.get_mut(&index).expect("a record").key = vip(9);
    maps.writes = 0;

    let migrated = migrate(&maps, ROOMY).expect("it fits");

    assert!(migrated.frontend_keys.contains_key(&vip(1)));
    assert!(!migrated.frontend_keys.contains_key(&vip(2)));
    assert_eq!(stored_in_sockets(&migrated).len(), 1);
}
