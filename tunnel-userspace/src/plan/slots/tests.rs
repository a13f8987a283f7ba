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
    let members: Vec<_> = (0_u8..).map(target).zip(weights.iter().copied()).collect();
    let layout = SlotLayout::required(algorithm, &members);
    let slots = layout.distribute(&members);
    assert_eq!(slots.len(), layout.slot_count(&members), "{layout:?}");
    slots
}

fn counts(slots: &[usize], backends: usize) -> Vec<usize> {
    let count = |backend| slots.iter().filter(|slot| **slot == backend).count();
    (0..backends).map(count).collect()
}

#[test]
fn backends_without_weights_get_one_slot_each_in_order() {
    assert_eq!(slots(Algorithm::RANDOM, &[1, 1, 1]), [0, 1, 2]);
    assert_eq!(slots(Algorithm::ROUND_ROBIN, &[40, 40]), [0, 1]);
    assert!(slots(Algorithm::RANDOM, &[]).is_empty());
    assert!(slots(Algorithm::MAGLEV, &[]).is_empty());
}

#[test]
fn a_backend_with_more_weight_gets_more_slots_spread_evenly() {
    assert_eq!(slots(Algorithm::RANDOM, &[3, 1]), [0, 0, 1, 0]);
    assert_eq!(slots(Algorithm::RANDOM, &[30, 10]), [0, 0, 1, 0]);
    assert_eq!(
        slots(Algorithm::ROUND_ROBIN, &[4, 2, 1]),
        [0, 1, 0, 2, 0, 1, 0]
    );
}

#[test]
fn a_maglev_table_has_100_slots_per_backend_but_one_for_a_single_backend() {
    assert_eq!(slots(Algorithm::MAGLEV, &[1]), [0]);
    assert_eq!(slots(Algorithm::MAGLEV, &[1, 1]).len(), 251);
    assert_eq!(slots(Algorithm::MAGLEV, &[1; 3]).len(), 509);
    assert_eq!(slots(Algorithm::MAGLEV, &[1; 200]).len(), 16_381);
}

#[test]
fn a_maglev_table_follows_the_weights() {
    let counts = counts(&slots(Algorithm::MAGLEV, &[3, 1]), 2);

    assert_eq!(counts.iter().sum::<usize>(), 251);
    assert!((186..=190).contains(&counts[0]), "{counts:?}");
}

#[test]
fn removing_a_backend_changes_few_other_slots_of_a_maglev_table() {
    let before = slots(Algorithm::MAGLEV, &[1; 10]);
    let others: Vec<_> = (0_u8..10).filter(|number| *number != 4).collect();
    let members: Vec<_> = others.iter().map(|number| (target(*number), 1)).collect();
    let after = SlotLayout::Maglev.distribute(&members);
    let after: Vec<_> = after
        .iter()
        .map(|member| usize::from(others[*member]))
        .collect();
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
        let found = slots(Algorithm::RANDOM, &weights);
        let total: u32 = weights.iter().sum();
        let slots = u32::try_from(found.len()).expect("a number of slots");
        for (backend, (count, weight)) in counts(&found, weights.len()).into_iter().zip(&weights).enumerate() {
            let count = u32::try_from(count).expect("a number of slots");
            prop_assert_eq!(count * total, weight * slots, "backend {}", backend);
        }
    }

    #[test]
    fn a_maglev_table_is_full_and_balanced(backends in 2..60_usize) {
        let found = slots(Algorithm::MAGLEV, &vec![1; backends]);
        let counts = counts(&found, backends);
        let (most, least) = (counts.iter().max().expect("some"), counts.iter().min().expect("some"));
        prop_assert!(TABLE_SIZES.contains(&found.len()));
        prop_assert!(most - least <= 1, "{counts:?}");
    }
}
