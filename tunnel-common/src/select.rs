//! Pure decisions of the data path.

use crate::{
    origin::{Origin, UDP_IDLE_NS},
    service::{Set, State},
};

/// The place in a set that a number leads to, counted from 0; none if the set is empty.
///
/// With a uniform random number the choice is uniform to within `len / 2^32`; with a counter it
/// goes round.
#[inline(always)]
#[must_use]
pub const fn place(set: Set, number: u32) -> Option<u32> {
    match set.len {
        0 => None,
        len => Some(number % len),
    }
}

/// A number that depends on every bit of some words, the same on every machine. The steps are those
/// of SplitMix64's output function, one round a word.
#[inline(always)]
#[must_use]
#[expect(clippy::as_conversions, reason = "the upper half of the hash")]
pub fn hash<const N: usize>(words: &[u32; N]) -> u32 {
    let mut state = 0_u64;
    // Unrolled for the verifier.
    for word in words {
        state = (state ^ u64::from(*word)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    (state >> 32) as u32
}

/// Whether a remembered UDP choice still holds: the front belongs to the same service port, the
/// backend is in the same use and serves, and the flow was not idle for too long. This is what
/// conntrack and kube-proxy's clean-up of it come to (kube-proxy `conntrack/cleanup.go`).
/// Another thread may have used the flow after the clock was read; then it was not idle.
#[inline(always)]
#[must_use]
pub fn is_sticky(origin: &Origin, service: u32, state: State, now: u64) -> bool {
    origin.service == service
        && origin.state == state
        && state.is_serving()
        && now.saturating_sub(origin.used) < UDP_IDLE_NS
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        addr::{Address, Port, Protocol},
        origin::ORIGIN_VERSION,
    };

    fn origin(service: u32, state: State, used: u64) -> Origin {
        Origin {
            used,
            vip: Address::UNSPECIFIED,
            backend: Address::UNSPECIFIED,
            index: 7,
            state,
            service,
            vip_port: Port::from_host(53),
            backend_port: Port::from_host(5353),
            protocol: Protocol::UDP,
            version: ORIGIN_VERSION,
            flags: 0,
            reserved: 0,
        }
    }

    #[test]
    fn an_empty_set_has_no_place() {
        assert_eq!(place(Set { base: 9, len: 0 }, 5), None);
    }

    #[test]
    fn a_counter_goes_round_the_whole_set() {
        let set = Set { base: 10, len: 3 };
        let places: Vec<_> = (0..6).filter_map(|number| place(set, number)).collect();

        assert_eq!(places, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn neighbours_are_spread_over_all_places() {
        let set = Set { base: 0, len: 8 };
        let mut counts = [0_u32; 8];
        for word in 0..8_000 {
            let chosen = place(set, hash(&[0, 0, word, 1])).expect("the set is not empty");
            counts[chosen as usize] += 1;
        }

        // A fair draw of 8,000 is within 5 standard deviations (30 each) of 1,000.
        assert!(
            counts.iter().all(|count| (850..1_150).contains(count)),
            "{counts:?}"
        );
        assert_ne!(hash(&[1, 0]), hash(&[0, 1]));
    }

    #[test]
    fn a_choice_sticks_until_the_backend_is_gone() {
        let serving = State::default().next_use();
        let choice = origin(3, serving, 0);

        assert!(is_sticky(&choice, 3, serving, 1));
        assert!(!is_sticky(&choice, 3, serving.gone(), 1));
    }

    #[test]
    fn a_choice_does_not_stick_to_the_next_use_of_its_index() {
        let serving = State::default().next_use();

        assert!(!is_sticky(
            &origin(3, serving, 0),
            3,
            serving.gone().next_use(),
            1
        ));
    }

    #[test]
    fn a_choice_does_not_stick_when_the_address_went_to_another_service() {
        let serving = State::default().next_use();

        assert!(!is_sticky(&origin(3, serving, 0), 4, serving, 1));
    }

    #[test]
    fn an_idle_flow_chooses_anew() {
        let serving = State::default().next_use();
        let choice = origin(3, serving, 5);

        assert!(is_sticky(&choice, 3, serving, 4 + UDP_IDLE_NS));
        assert!(!is_sticky(&choice, 3, serving, 5 + UDP_IDLE_NS));
        assert!(
            is_sticky(&choice, 3, serving, 4),
            "another thread was quicker"
        );
    }

    proptest! {
        #[test]
        fn a_place_is_always_within_its_set(base in 0..1_000_000_u32, len in 1..100_000_u32, number: u32) {
            let chosen = place(Set { base, len }, number).expect("the set is not empty");
            prop_assert!(chosen < len);
        }
    }
}
