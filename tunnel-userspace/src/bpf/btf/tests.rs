use proptest::prelude::*;

use super::*;

const STRINGS: &[u8] = b"\0outer\0inner\0plain\0hidden\0walk\0alias\0bits\0flag\0";

fn at(name: &str) -> u32 {
    let found = STRINGS
        .windows(name.len() + 2)
        .position(|window| &window[1..=name.len()] == name.as_bytes());
    u32::try_from(found.expect("a name") + 1).expect("short")
}

fn kind(name: u32, kind: u32, count: u32, of: u32, rest: &[u32]) -> Vec<u8> {
    let words = [&[name, kind << 24 | count, of], rest].concat();
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Bit 31 of a type's info: members have the width of bit fields.
const FLAG: u32 = 1 << 7;

/// Returns BTF with an integer, a structure of it, an anonymous union, a structure of those, a function, a
/// typedef and a structure with a bit field.
fn description() -> Vec<u8> {
    let types = [
        kind(0, 1, 0, 4, &[32]),
        kind(at("inner"), STRUCT, 1, 4, &[at("plain"), 1, 32]),
        kind(0, UNION, 1, 8, &[at("hidden"), 1, 64]),
        kind(
            at("outer"),
            STRUCT,
            3,
            24,
            &[at("alias"), 6, 64, 0, 3, 128, at("plain"), 1, 0],
        ),
        kind(at("walk"), FUNC, 0, 1, &[]),
        kind(at("alias"), TYPEDEF, 0, 2, &[]),
        // Bit fields: 3 bits from the 17th on.
        kind(
            at("bits"),
            FLAG | STRUCT,
            1,
            4,
            &[at("flag"), 1, 3 << 24 | 17],
        ),
    ]
    .concat();
    wrapped(&types)
}

/// Adds the header and the strings to encoded types.
fn wrapped(types: &[u8]) -> Vec<u8> {
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("short");
    let mut whole = MAGIC.to_ne_bytes().to_vec();
    whole.extend([1, 0]);
    let header = [24, 0, length(types), length(types), length(STRINGS)];
    whole.extend(header.iter().flat_map(|word: &u32| word.to_ne_bytes()));
    whole.extend(types);
    whole.extend(STRINGS);
    whole
}

#[test]
fn functions_structures_and_members_are_found_by_name() {
    let whole = description();
    let btf = Btf::parse(&whole).expect("a description");

    assert_eq!(btf.find(Kind::Function, "walk"), Some(5));
    assert_eq!(btf.find(Kind::Function, "outer"), None);
    let outer = btf.find(Kind::Struct, "outer").expect("there");
    let offset = |name: &str| btf.member(outer, name).map(|member| member.offset);
    assert_eq!(offset("plain"), Some(0));
    // In an anonymous member.
    assert_eq!(offset("hidden"), Some(24));
    assert_eq!(offset("plai"), None);
    // Through a typedef.
    let alias = btf.member(outer, "alias").expect("there");
    let inner = btf.member_of(alias, "plain").map(|member| member.offset);
    assert_eq!(inner, Some(12));
}

#[test]
fn the_search_in_a_structure_that_contains_itself_is_bounded() {
    let members = [0, 1, 0].repeat(100);
    let types = kind(at("outer"), STRUCT, 100, 4, &members);
    let whole = wrapped(&types);
    let btf = Btf::parse(&whole).expect("a description");

    assert_eq!(btf.member(1, "nowhere"), None);
}

#[test]
fn a_bit_field_is_found_by_its_byte_and_bits() {
    let whole = description();
    let btf = Btf::parse(&whole).expect("a description");
    let member = |of: &str, name: &str| {
        let outer = btf.find(Kind::Struct, of).expect("there");
        let Member {
            offset,
            bit,
            width,
            kind: _,
        } = btf.member(outer, name).expect("there");
        (offset, bit, width)
    };

    assert_eq!(member("bits", "flag"), (2, 1, 3));
    assert_eq!(member("inner", "plain"), (4, 0, 0));
}

#[test]
fn an_unknown_kind_of_type_makes_btf_invalid() {
    let mut whole = description();
    // Corrupts the last type, so that no later type can cause the failure.
    let strings = whole.len() - STRINGS.len();
    whole[strings - 17] = 30;

    assert!(Btf::parse(&whole).is_none());
}

proptest! {
    #[test]
    fn corrupt_btf_causes_no_panic(offset in 0_usize..220, byte: u8, cut in 0_usize..220) {
        let mut whole = description();
        if let Some(target) = whole.get_mut(offset) {
            *target = byte;
        }
        whole.truncate(whole.len().saturating_sub(cut));
        if let Some(btf) = Btf::parse(&whole) {
            for id in 0..9 {
                let _found = btf.member(id, "plain");
            }
        }
    }
}
