//! Migration to steering maps of a different size.

use super::{super::super::SteeringMapsSnapshot, *};

/// Copies the contents of the steering maps into maps of a different size.
fn migrate(
    steering: SteeringReconciler<Memory>,
    wanted: u32,
    now: Duration,
) -> Result<Memory, String> {
    let had = steering.sizes;
    let snapshot = SteeringMapsSnapshot::read(&steering.maps, had, now).expect("read");
    let wanted = sizes(wanted);
    snapshot.fits(wanted).map_err(|error| error.to_string())?;
    let mut to = Memory {
        capacity: to_usize(wanted.steer_entries()),
        ..Memory::default()
    };
    snapshot.write(&mut to).expect("written");
    Ok(to)
}

/// Returns a steering reconciler with one node, which has indices 2 and 3. Another node, which had indices 0
/// and 1, was removed.
fn with_second_node() -> SteeringReconciler<Memory> {
    let mut steering = steering_with(16, ["a", "b"]);
    apply(&mut steering, vec![removed("a")], NOW);
    steering
}

#[test]
fn a_migration_keeps_the_meaning_of_each_steering_address() {
    for size in [2, 64] {
        let steering = with_second_node();
        let before = published_targets(&steering);
        let maps = migrate(steering, size, NOW).expect("it fits");

        let mut after = adopt(maps, size, NOW);
        apply(&mut after, nodes(["b"]), NOW);

        assert_eq!(published_targets(&after), before);
    }
}

#[test]
fn a_migration_keeps_indices_in_quarantine_and_frees_the_others() {
    let maps = migrate(with_second_node(), 64, NOW).expect("it fits");
    assert!(maps.records.keys().eq(&[0, 1, 2, 3]));
    let mut after = adopt(maps, 64, NOW);
    apply(&mut after, nodes(["b", "c"]), NOW);
    assert!(after.keys.values().all(|index| *index >= 2));

    let maps = migrate(with_second_node(), 64, NOW + QUARANTINE).expect("it fits");
    assert!(maps.records.keys().eq(&[2, 3]));
}

#[test]
fn a_size_too_small_for_indices_in_use_or_quarantine_is_refused() {
    let steering = with_second_node();
    let snapshot = SteeringMapsSnapshot::read(&steering.maps, steering.sizes, NOW).expect("read");
    let misfit = |size| snapshot.fits(sizes(size)).expect_err("too small");
    let text = misfit(1).to_string();
    assert!(text.contains("bpf.maps.steering of 1 is too small") && text.contains("needs 2"));
    // If steering is off, the size does not come from the config.
    assert!(misfit(1).is_configured() && !misfit(MapSizes::DISABLED).is_configured());

    let mut steering = steering_with(16, ["a"]);
    apply(&mut steering, replace_node("a", "b"), NOW);
    apply(&mut steering, vec![removed("b")], NOW);
    assert!(migrate(steering, 1, NOW).is_err());
}
