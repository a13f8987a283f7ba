use proptest::prelude::*;

use super::*;

const STRINGS: &[u8] = b"\0outer\0inner\0plain\0hidden\0walk\0alias\0bits\0flag\0";

fn name_offset(name: &str) -> u32 {
    let found = STRINGS
        .windows(name.len() + 2)
        .position(|window| &window[1..=name.len()] == name.as_bytes());
    u32::try_from(found.expect("a name") + 1).expect("short")
}

fn encode_type(name: u32, kind: u32, count: u32, of: u32, rest: &[u32]) -> Vec<u8> {
    let words = [&[name, kind << 24 | count, of], rest].concat();
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A flag that, added to a type's kind, sets bit 31 of the type's info: each member's offset then also
/// encodes a bit-field width.
const FLAG: u32 = 1 << 7;

/// Returns BTF with an integer, a structure that contains it, an anonymous union, a structure that contains
/// all of these, a function, a typedef, and a structure with a bit field.
fn valid_btf() -> Vec<u8> {
    let types = [
        encode_type(0, 1, 0, 4, &[32]),
        encode_type(
            name_offset("inner"),
            STRUCT,
            1,
            4,
            &[name_offset("plain"), 1, 32],
        ),
        encode_type(0, UNION, 1, 8, &[name_offset("hidden"), 1, 64]),
        encode_type(
            name_offset("outer"),
            STRUCT,
            3,
            24,
            &[
                name_offset("alias"),
                6,
                64,
                0,
                3,
                128,
                name_offset("plain"),
                1,
                0,
            ],
        ),
        encode_type(name_offset("walk"), FUNC, 0, 1, &[]),
        encode_type(name_offset("alias"), TYPEDEF, 0, 2, &[]),
        // A bit field that is 3 bits wide and starts at bit 17.
        encode_type(
            name_offset("bits"),
            FLAG | STRUCT,
            1,
            4,
            &[name_offset("flag"), 1, 3 << 24 | 17],
        ),
    ]
    .concat();
    with_header(&types)
}

/// Adds the header and the strings to encoded types.
fn with_header(types: &[u8]) -> Vec<u8> {
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("short");
    let mut btf_bytes = MAGIC.to_ne_bytes().to_vec();
    btf_bytes.extend([1, 0]);
    let header = [24, 0, length(types), length(types), length(STRINGS)];
    btf_bytes.extend(header.iter().flat_map(|word: &u32| word.to_ne_bytes()));
    btf_bytes.extend(types);
    btf_bytes.extend(STRINGS);
    btf_bytes
}

#[test]
fn functions_structures_and_members_are_found_by_name() {
    let btf_bytes = valid_btf();
    let btf = Btf::parse(&btf_bytes).expect("valid BTF");

    assert_eq!(btf.find(TypeKind::Function, "walk"), Some(5));
    assert_eq!(btf.find(TypeKind::Function, "outer"), None);
    let outer = btf.find(TypeKind::Struct, "outer").expect("it exists");
    let offset = |name: &str| btf.member(outer, name).map(|member| member.offset);
    assert_eq!(offset("plain"), Some(0));
    // In an anonymous member.
    assert_eq!(offset("hidden"), Some(24));
    assert_eq!(offset("plai"), None);
    // Through a typedef.
    let alias = btf.member(outer, "alias").expect("it exists");
    let inner = btf.member_of(alias, "plain").map(|member| member.offset);
    assert_eq!(inner, Some(12));
}

#[test]
fn the_search_in_a_structure_that_contains_itself_is_bounded() {
    let members = [0, 1, 0].repeat(100);
    let types = encode_type(name_offset("outer"), STRUCT, 100, 4, &members);
    let btf_bytes = with_header(&types);
    let btf = Btf::parse(&btf_bytes).expect("valid BTF");

    assert_eq!(btf.member(1, "nowhere"), None);
}

#[test]
fn a_bit_field_is_found_by_its_byte_and_bits() {
    let btf_bytes = valid_btf();
    let btf = Btf::parse(&btf_bytes).expect("valid BTF");
    let member = |of: &str, name: &str| {
        let outer = btf.find(TypeKind::Struct, of).expect("it exists");
        let Member {
            offset,
            bit,
            width,
            type_id: _,
        } = btf.member(outer, name).expect("it exists");
        (offset, bit, width)
    };

    assert_eq!(member("bits", "flag"), (2, 1, 3));
    assert_eq!(member("inner", "plain"), (4, 0, 0));
}

#[test]
fn an_unknown_kind_of_type_makes_btf_invalid() {
    let mut btf_bytes = valid_btf();
    // Corrupts the last type, so that no later type can cause the failure.
    let strings = btf_bytes.len() - STRINGS.len();
    btf_bytes[strings - 17] = 30;

    assert!(Btf::parse(&btf_bytes).is_none());
}

proptest! {
    #[test]
    fn corrupt_btf_causes_no_panic(offset in 0_usize..220, byte: u8, cut in 0_usize..220) {
        let mut btf_bytes = valid_btf();
        if let Some(target) = btf_bytes.get_mut(offset) {
            *target = byte;
        }
        btf_bytes.truncate(btf_bytes.len().saturating_sub(cut));
        if let Some(btf) = Btf::parse(&btf_bytes) {
            for id in 0..9 {
                let _found = btf.member(id, "plain");
            }
        }
    }
}
