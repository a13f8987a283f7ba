//! Pure functions of the data path: they select a slot, hash a client, search source ranges, and check a
//! socket's stored choice.

use core::cmp::Ordering;

use crate::{
    addr::Address,
    origin::{Origin, UDP_IDLE_NS},
    service::{Backend, BackendState, IndexRange, SourceRange},
};

/// The maximum number of steps in the binary search of a frontend's source ranges. A frontend has fewer than
/// 2^MAX_STEPS ranges.
const MAX_STEPS: u32 = 16;

/// The maximum number of source ranges that a frontend may have.
pub const MAX_SOURCE_RANGES: u32 = (1 << MAX_STEPS) - 1;

/// Maps a number to an offset in a set. Returns `None` if the set is empty.
///
/// A uniform random number gives a uniform offset, to within `len / 2^32`. A counter gives round-robin.
#[inline(always)]
#[must_use]
pub const fn offset_in(set: IndexRange, number: u32) -> Option<u32> {
    match set.len {
        0 => None,
        len => Some(number % len),
    }
}

/// Maps two numbers to two different offsets in a set. Returns `None` if the set has fewer than two slots. If
/// the numbers are uniformly random, each pair is equally likely, to within `len / 2^32`.
#[inline(always)]
#[must_use]
pub const fn two_offsets_in(set: IndexRange, number: u32, other: u32) -> Option<(u32, u32)> {
    if set.len < 2 {
        return None;
    }
    let first = number % set.len;
    let second = other % set.len.wrapping_sub(1);
    // Skips `first`: offsets at or after it are shifted up by one.
    let second = if second < first {
        second
    } else {
        second.wrapping_add(1)
    };
    Some((first, second))
}

/// Returns true if the second backend has fewer open connections than the first, in proportion to their
/// shares of the set. Each backend is given as its number of open connections, modulo 2^64, and its share.
///
/// A negative number is treated as zero; see [`non_negative`].
#[inline(always)]
#[must_use]
pub const fn is_less_loaded((open, share): (u64, u32), (other, its_share): (u64, u32)) -> bool {
    // Compares open / share for the two backends, multiplied by both shares to avoid a division.
    non_negative(other).wrapping_mul(widen(share))
        < non_negative(open).wrapping_mul(widen(its_share))
}

#[inline(always)]
#[expect(clippy::as_conversions, reason = "`From` is not const")]
const fn widen(share: u32) -> u64 {
    share as u64
}

/// Returns the number of open connections, or 0 if the count is negative modulo 2^64. A count becomes
/// negative if a socket's connect() was counted in an earlier map and only its close() in this one.
#[inline(always)]
#[must_use]
pub const fn non_negative(open: u64) -> u64 {
    if open > u64::MAX / 2 { 0 } else { open }
}

/// Returns a hash of the words that is the same on every machine. Each word goes through one round of
/// SplitMix64's output function.
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

/// Returns true if an address is in one of the source ranges, which are disjoint and in ascending order.
/// `source` returns the range at an index.
#[inline(always)]
#[must_use]
pub fn is_in_ranges<'a>(
    set: IndexRange,
    address: &Address,
    source: impl Fn(u32) -> Option<&'a SourceRange>,
) -> bool {
    let (mut low, mut high) = (set.base, set.base.wrapping_add(set.len));
    // MAX_STEPS bounds the loop, as the verifier requires.
    for _ in 0..MAX_STEPS {
        if low >= high {
            return false;
        }
        let middle = low.wrapping_add(high.wrapping_sub(low) / 2);
        let Some(range) = source(middle) else {
            return false;
        };
        if address.cmp(&range.first) == Ordering::Less {
            high = middle;
        } else if address.cmp(&range.last) == Ordering::Greater {
            low = middle.wrapping_add(1);
        } else {
            return true;
        }
    }
    false
}

/// Returns true if a UDP socket's backend is still serving. `state` is the current state at the backend's
/// index, which equals the stored state only in the same generation of the index.
#[inline(always)]
#[must_use]
pub fn serves_flow(origin: &Origin, state: BackendState) -> bool {
    origin.state == state && state.is_serving()
}

/// Returns true if a TCP socket's backend is still serving. `backend` is the current record at the backend's
/// index. A TCP socket doesn't store the generation of the index, so a later backend with the same address,
/// port and service port counts as the same backend.
#[must_use]
pub fn serves_connection(origin: &Origin, backend: &Backend) -> bool {
    backend.state.is_serving()
        && backend.service == origin.service
        && origin.leads_to(&backend.address, backend.port)
}

/// Returns true if a UDP socket's backend was removed and its index has not been reused yet.
#[must_use]
pub fn is_removed(origin: &Origin, state: BackendState) -> bool {
    state == origin.state.removed()
}

/// Returns true if a UDP flow keeps its backend: the frontend belongs to the same service port, the backend
/// is still serving in the same generation, and the flow has not been idle for too long. kube-proxy gets the
/// same effect from conntrack, by deleting stale entries (`conntrack/cleanup.go`).
///
/// `now` may be earlier than the last use if another thread used the flow in the meantime. The flow then
/// counts as in use.
#[inline(always)]
#[must_use]
pub fn is_sticky(origin: &Origin, service: u32, state: BackendState, now: u64) -> bool {
    origin.service == service
        && serves_flow(origin, state)
        && now.saturating_sub(origin.last_used) < UDP_IDLE_NS
}

#[cfg(test)]
mod tests {
    use core::net::Ipv6Addr;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        addr::{Port, Protocol},
        service::FrontendKey,
    };

    fn origin(service: u32, state: BackendState, used: u64) -> Origin {
        let key = FrontendKey::new(Address::UNSPECIFIED, Port::from_host(53), Protocol::UDP);
        Origin {
            last_used: used,
            index: 7,
            state,
            service,
            ..Origin::new(&key, Address::UNSPECIFIED, Port::from_host(5353))
        }
    }

    #[test]
    fn a_counter_cycles_through_the_set_and_an_empty_set_has_no_offset() {
        let offsets =
            |len| [0, 1, 2, 3, 4, 5].map(|number| offset_in(IndexRange { base: 10, len }, number));

        assert_eq!(offsets(3), [0, 1, 2, 0, 1, 2].map(Some));
        assert_eq!(offsets(0), [None; 6]);
    }

    #[test]
    fn neighbouring_addresses_are_spread_over_all_offsets() {
        let set = IndexRange { base: 0, len: 8 };
        let mut counts = [0_u32; 8];
        for word in 0..8_000 {
            let chosen = offset_in(set, hash(&[0, 0, word, 1])).expect("the set is not empty");
            counts[chosen as usize] += 1;
        }

        // With 8,000 uniform draws, each count is within 5 standard deviations (about 30 each) of 1,000.
        assert!(
            counts.iter().all(|count| (850..1_150).contains(count)),
            "{counts:?}"
        );
        assert_ne!(hash(&[1, 0]), hash(&[0, 1]));
    }

    fn address(bits: u128) -> Address {
        Address::from_ip(Ipv6Addr::from_bits(bits).into())
    }

    fn source(first: u128, last: u128) -> SourceRange {
        let [first, last] = [first, last].map(address);
        SourceRange { first, last }
    }

    fn is_found(sources: &[SourceRange], base: u32, bits: u128) -> bool {
        let at = |index: u32| sources.get(index as usize);
        let len = u32::try_from(sources.len()).expect("few") - base;
        is_in_ranges(IndexRange { base, len }, &address(bits), at)
    }

    #[test]
    fn an_address_is_found_in_the_range_that_holds_it() {
        let top = 1 << 127;
        let sources = [
            source(1, 3),
            source(5, 5),
            source(1 << 64, (1 << 64) + 7),
            source(top, u128::MAX),
        ];

        for inside in [1, 2, 3, 5, 1 << 64, (1 << 64) + 7, top, top + 1, u128::MAX] {
            assert!(is_found(&sources, 0, inside), "{inside:x}");
        }
        for outside in [0, 4, 6, (1 << 64) - 1, (1 << 64) + 8, top - 1] {
            assert!(!is_found(&sources, 0, outside), "{outside:x}");
        }
        assert!(!is_found(&sources, 1, 2), "before the set");
        assert!(!is_found(&[], 0, 2), "an empty set");
    }

    #[test]
    fn a_choice_sticks_while_its_backend_serves_its_service_and_its_flow_is_in_use() {
        let serving = BackendState::default().next_generation();
        let next = serving.removed().next_generation();
        let choice = origin(3, serving, 5);
        for (what, service, state, now, sticks) in [
            ("the backend serves", 3, serving, 6, true),
            ("the backend is removed", 3, serving.removed(), 6, false),
            ("its index is reused", 3, next, 6, false),
            (
                "the frontend belongs to another service",
                4,
                serving,
                6,
                false,
            ),
            ("a flow pauses", 3, serving, 4 + UDP_IDLE_NS, true),
            ("a flow is idle", 3, serving, 5 + UDP_IDLE_NS, false),
            ("another thread used it meanwhile", 3, serving, 4, true),
        ] {
            assert_eq!(is_sticky(&choice, service, state, now), sticks, "{what}");
        }
    }

    #[test]
    fn the_less_loaded_of_two_has_fewer_connections_in_proportion_to_its_share() {
        assert!(is_less_loaded((2, 1), (1, 1)));
        assert!(!is_less_loaded((1, 1), (1, 1)), "the first of two alike");
        assert!(is_less_loaded((2, 1), (5, 3)), "5/3 is less than 2");
        assert!(!is_less_loaded((2, 1), (6, 3)));
        assert!(!is_less_loaded((5, 3), (2, 1)));
        assert!(
            is_less_loaded((1, 1), (u64::MAX, 1)),
            "a negative count is zero"
        );
        assert!(!is_less_loaded((0, 1), (u64::MAX, 1)));
    }

    #[test]
    fn each_pair_of_offsets_is_equally_likely() {
        let set = IndexRange { base: 0, len: 4 };
        let mut counts = [[0_u32; 4]; 4];
        for (number, other) in (0..4).flat_map(|one| (0..3).map(move |other| (one, other))) {
            let (first, second) =
                two_offsets_in(set, number, other).expect("the set has four slots");
            counts[first as usize][second as usize] += 1;
        }

        assert_eq!(
            counts,
            [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]
        );
        assert_eq!(two_offsets_in(IndexRange { base: 0, len: 1 }, 3, 3), None);
    }

    proptest! {
        #[test]
        fn as_many_source_ranges_as_a_frontend_may_have_are_searched(position in 0..MAX_SOURCE_RANGES) {
            let sources: Vec<_> = (0..u128::from(MAX_SOURCE_RANGES))
                .map(|number| source(number * 4 + 1, number * 4 + 2))
                .collect();
            let first = u128::from(position) * 4;
            let found = [0, 1, 2, 3].map(|offset| is_found(&sources, 0, first + offset));
            prop_assert_eq!(found, [false, true, true, false]);
        }

        #[test]
        fn an_offset_is_always_within_its_set(base in 0..1_000_000_u32, len in 1..100_000_u32, number: u32) {
            let chosen = offset_in(IndexRange { base, len }, number).expect("the set is not empty");
            prop_assert!(chosen < len);
        }
    }
}
