use super::*;
use crate::{addr::Protocol, origin::UDP_IDLE_NS, service::FrontendKey};

#[expect(clippy::as_conversions, reason = "small numbers")]
fn at(number: u32) -> usize {
    number as usize
}

const BACKEND_PORT: Port = Port::from_host(5353);

fn address(network: u8, number: u32) -> Address {
    let [_, _, upper, lower] = number.to_be_bytes();
    Address::from_ip([10, network, upper, lower].into())
}

/// Returns the translation of the VIP with this number to the backend with the same number.
fn translation(number: u32, last_used: u64) -> Origin {
    let key = FrontendKey::new(address(96, number), Port::from_host(53), Protocol::UDP);
    Origin {
        last_used,
        ..Origin::new(&key, address(1, number), BACKEND_PORT)
    }
}

fn few(translations: &[Origin]) -> OlderFew {
    let mut few = OlderFew {
        entries: zerocopy::FromZeros::new_zeroed(),
    };
    few.entries[..translations.len()].copy_from_slice(translations);
    few
}

fn many(count: u32, last_used: impl Fn(u32) -> u64) -> Box<OlderMany> {
    let mut many: Box<OlderMany> = Box::new(zerocopy::FromZeros::new_zeroed());
    for number in 0..count {
        let origin = translation(number, last_used(number));
        many.entries[at(number)] = origin;
        many.tags[at(number)] = tags(&origin);
    }
    many.used = count;
    many
}

fn find(many: &OlderMany, (address, port, direction): (Address, Port, Direction)) -> Option<u32> {
    let is_match = |number| many.matches(at(number), &address, port, direction);
    many.find(&address, port, direction, at, is_match)
}

#[test]
fn a_translation_is_found_by_its_vip_and_by_its_backend() {
    let some = few(&[translation(1, 10), translation(2, 20), translation(3, 30)]);
    let all = many(MANY, |_| 1);
    let vip = |number| (address(96, number), Port::from_host(53), Direction::FORWARD);
    let backend = |number| (address(1, number), BACKEND_PORT, Direction::REVERSE);

    for key in [vip, backend] {
        let (address, port, direction) = key(3);
        assert_eq!(some.find(&address, port, direction), Some(2));
        let (address, port, direction) = key(4);
        assert_eq!(some.find(&address, port, direction), None);
        for number in 0..MANY {
            let (address, _, direction) = key(number);
            assert_eq!(find(&all, key(number)), Some(number));
            assert_eq!(find(&all, (address, Port::from_host(54), direction)), None);
        }
        assert_eq!(find(&all, key(MANY)), None);
    }
}

#[test]
fn of_several_translations_the_most_recently_used_is_found() {
    let twice = |one, other| {
        few(&[
            translation(1, one),
            translation(2, 5),
            translation(1, other),
        ])
    };
    let find_few =
        |few: OlderFew| few.find(&address(96, 1), Port::from_host(53), Direction::FORWARD);

    assert_eq!(find_few(twice(1, 2)), Some(2));
    assert_eq!(find_few(twice(2, 1)), Some(0));
    assert_eq!(find_few(twice(0, 0)), None, "unused entries are not found");

    let mut all = many(MANY, |_| 5);
    all.entries[70].last_used = 0;
    let key = (address(96, 70), Port::from_host(53), Direction::FORWARD);
    assert_eq!(find(&all, key), None, "unused entries are not found");
}

#[test]
fn a_replaced_translation_is_found_only_by_its_backend() {
    let vip = (address(96, 1), Port::from_host(53));
    let replaced = Origin {
        flags: Origin::REPLACED,
        ..translation(1, 9)
    };
    let current = Origin {
        backend: address(1, 2),
        ..translation(1, 5)
    };
    let some = few(&[replaced, current]);
    assert_eq!(some.find(&vip.0, vip.1, Direction::FORWARD), Some(1));
    let of_replaced = (replaced.backend, BACKEND_PORT, Direction::REVERSE);
    let (backend, port, direction) = of_replaced;
    assert_eq!(some.find(&backend, port, direction), Some(0));

    let mut all = many(0, |_| 0);
    for (number, origin) in [(0, replaced), (1, current)] {
        all.entries[number] = origin;
        all.tags[number] = tags(&origin);
    }
    assert_eq!(find(&all, (vip.0, vip.1, Direction::FORWARD)), Some(1));
    assert_eq!(find(&all, of_replaced), Some(0));
}

#[test]
fn the_entry_to_reuse_is_an_unused_one_or_else_the_least_recently_used() {
    let full = [4, 6, 3, 9, 8, 7].map(|last_used| translation(1, last_used));
    let mut with_unused = full;
    with_unused[4].last_used = 0;

    assert_eq!(few(&full).least_recent(0, at), 2);
    assert_eq!(few(&full).least_recent(3, at), 5);
    assert_eq!(few(&with_unused).least_recent(0, at), 4);
    assert_eq!(few(&full[..2]).least_recent(1, at), 2);
    assert_eq!(many(7, |_| 1).least_recent(at), 7);
    let last_used = |number| {
        if number == 70 {
            5
        } else {
            10 + u64::from(number)
        }
    };
    assert_eq!(many(MANY, last_used).least_recent(at), 70);
}

#[test]
fn a_translation_is_live_until_its_flow_is_idle() {
    let origin = translation(1, 10);

    assert!(origin.is_live(10) && origin.is_live(9 + UDP_IDLE_NS));
    assert!(!origin.is_live(10 + UDP_IDLE_NS));
    assert!(origin.is_live(9), "another CPU's clock");
    assert!(!translation(1, 0).is_live(1), "unused");
    assert!(!Origin::without_translation().is_live(1));
}
