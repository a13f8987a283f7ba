use proptest::prelude::*;
use tunnel_common::addr::{Address, Port};

use super::*;

/// Returns the backend with this number.
fn target(number: u8) -> BackendTarget {
    let ip = std::net::Ipv4Addr::new(10, 1, 0, number);
    BackendTarget {
        address: Address::from_ip(ip.into()),
        port: Port::from_host(8080),
    }
}

/// Distributes the slots of a set whose backends have these weights, and returns the number of the backend in
/// each slot.
fn slots(algorithm: Algorithm, weights: &[u32]) -> Vec<usize> {
    let targets: Vec<_> = (0_u8..).map(target).take(weights.len()).collect();
    let weights = targets
        .iter()
        .copied()
        .zip(weights.iter().copied())
        .collect();
    let slots = distribute_slots(algorithm, &targets.iter().copied().collect(), &weights);
    let number = |slot: &BackendTarget| targets.iter().position(|target| target == slot);
    slots.iter().filter_map(number).collect()
}

fn counts(slots: &[usize], backends: usize) -> Vec<usize> {
    let count = |backend| slots.iter().filter(|slot| **slot == backend).count();
    (0..backends).map(count).collect()
}

#[test]
fn backends_without_weights_get_one_slot_each_in_order() {
    assert_eq!(slots(Algorithm::Random, &[1, 1, 1]), [0, 1, 2]);
    assert_eq!(slots(Algorithm::RoundRobin, &[40, 40]), [0, 1]);
    assert!(slots(Algorithm::Random, &[]).is_empty());
    assert!(slots(Algorithm::Maglev, &[]).is_empty());
}

#[test]
fn a_backend_with_more_weight_gets_more_slots_spread_evenly() {
    assert_eq!(slots(Algorithm::Random, &[3, 1]), [0, 0, 1, 0]);
    assert_eq!(slots(Algorithm::Random, &[30, 10]), [0, 0, 1, 0]);
    assert_eq!(
        slots(Algorithm::RoundRobin, &[4, 2, 1]),
        [0, 1, 0, 2, 0, 1, 0]
    );
}

#[test]
fn a_backend_with_weight_0_gets_no_slot_unless_all_have_weight_0() {
    for algorithm in [Algorithm::Random, Algorithm::Maglev] {
        let some = slots(algorithm, &[0, 5, 0, 5]);
        assert!(some.iter().all(|backend| [1, 3].contains(backend)));
        assert_eq!(
            counts(&slots(algorithm, &[0, 0]), 2).iter().min(),
            counts(&slots(algorithm, &[1, 1]), 2).iter().min()
        );
    }
    assert_eq!(slots(Algorithm::Random, &[0, 0]), [0, 1]);
}

#[test]
fn a_maglev_table_has_100_slots_per_backend_but_one_for_a_single_backend() {
    assert_eq!(slots(Algorithm::Maglev, &[1]), [0]);
    assert_eq!(slots(Algorithm::Maglev, &[1, 1]).len(), 251);
    assert_eq!(slots(Algorithm::Maglev, &[1; 3]).len(), 509);
    assert_eq!(slots(Algorithm::Maglev, &[1; 200]).len(), 16_381);
}

#[test]
fn a_maglev_table_follows_the_weights() {
    let counts = counts(&slots(Algorithm::Maglev, &[3, 1]), 2);

    assert_eq!(counts.iter().sum::<usize>(), 251);
    assert!((186..=190).contains(&counts[0]), "{counts:?}");
}

#[test]
fn removing_a_backend_changes_few_other_slots_of_a_maglev_table() {
    let before = slots(Algorithm::Maglev, &[1; 10]);
    let mut weights = [1; 10];
    weights[4] = 0;
    let after = slots(Algorithm::Maglev, &weights);
    let kept = before.iter().zip(&after).filter(|(old, _)| **old != 4);
    let (kept, changed): (Vec<_>, Vec<_>) = kept.partition(|(old, new)| old == new);

    assert_eq!(before.len(), after.len());
    // According to section 5.3 of the paper, a few per cent of the other slots change. With a hash modulo the
    // number of backends, 90 % would.
    let share = 100 * changed.len() / (changed.len() + kept.len());
    assert!(share < 15, "{share} % changed");
}

proptest! {
    #[test]
    fn slots_are_proportional_to_weights(weights in prop::collection::vec(1..=100_u32, 1..40)) {
        let found = slots(Algorithm::Random, &weights);
        let total: u32 = weights.iter().sum();
        let slots = u32::try_from(found.len()).expect("a number of slots");
        for (backend, (count, weight)) in counts(&found, weights.len()).into_iter().zip(&weights).enumerate() {
            let count = u32::try_from(count).expect("a number of slots");
            prop_assert_eq!(count * total, weight * slots, "backend {}", backend);
        }
    }

    #[test]
    fn a_maglev_table_is_full_and_balanced(backends in 2..60_usize) {
        let found = slots(Algorithm::Maglev, &vec![1; backends]);
        let counts = counts(&found, backends);
        let (most, least) = (counts.iter().max().expect("some"), counts.iter().min().expect("some"));
        prop_assert!(TABLE_SIZES.contains(&found.len()));
        prop_assert!(most - least <= 1, "{counts:?}");
    }
}
