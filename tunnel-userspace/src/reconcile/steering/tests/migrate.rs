//! Steering maps of another size.

use super::{super::super::SteeringMapsSnapshot, *};

/// Copies the content of the steering maps into maps of another size.
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

/// Returns steering for a node with the indices 2 and 3; another node had indices 0 and 1, and was removed.
fn second_stays() -> SteeringReconciler<Memory> {
    let mut steering = steered(16, ["a", "b"]);
    apply(&mut steering, vec![gone("a")], NOW);
    steering
}

#[test]
fn each_steering_address_stands_for_the_same_in_maps_of_another_size() {
    for size in [2, 64] {
        let steering = second_stays();
        let before = shown(&steering);
        let maps = migrate(steering, size, NOW).expect("it fits");

        let mut after = adopt(maps, size, NOW);
        apply(&mut after, nodes(["b"]), NOW);

        assert_eq!(shown(&after), before);
    }
}

#[test]
fn an_index_that_rests_goes_on_resting_and_one_that_rested_does_not() {
    let maps = migrate(second_stays(), 64, NOW).expect("it fits");
    assert!(maps.records.keys().eq(&[0, 1, 2, 3]));
    let mut after = adopt(maps, 64, NOW);
    apply(&mut after, nodes(["b", "c"]), NOW);
    assert!(after.keys.values().all(|index| *index >= 2));

    let maps = migrate(second_stays(), 64, NOW + QUARANTINE).expect("it fits");
    assert!(maps.records.keys().eq(&[2, 3]));
}

#[test]
fn a_size_without_room_for_what_is_steered_or_rests_is_refused() {
    let steering = second_stays();
    let snapshot = SteeringMapsSnapshot::read(&steering.maps, steering.sizes, NOW).expect("read");
    let misfit = |size| snapshot.fits(sizes(size)).expect_err("too small");
    let text = misfit(1).to_string();
    assert!(text.contains("bpf.maps.steering of 1 is too small") && text.contains("needs 2"));
    // If nothing is steered, the config does not set the size.
    assert!(misfit(1).is_configured() && !misfit(MapSizes::DISABLED).is_configured());

    let mut steering = steered(16, ["a"]);
    apply(&mut steering, exchanged("a", "b"), NOW);
    apply(&mut steering, vec![gone("b")], NOW);
    assert!(migrate(steering, 1, NOW).is_err());
}
