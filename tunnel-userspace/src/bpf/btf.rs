//! Parses the kernel's BTF, the description of its types (`Documentation/bpf/btf.rst`), to find functions
//! and members of structures. aya parses BTF too, but doesn't export members. Pure.

use zerocopy::FromBytes as _;

/// The file with the kernel's BTF.
pub(super) const TYPES: &str = "/sys/kernel/btf/vmlinux";

/// The kinds of types that can be searched.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub(super) enum Kind {
    Struct = STRUCT,
    Function = FUNC,
}

const MAGIC: u16 = 0xeb9f;
/// The sizes in bytes of a type, without the data that depends on its kind, and of a member.
const TYPE: usize = 12;
const MEMBER: usize = 12;

const STRUCT: u32 = 4;
const UNION: u32 = 5;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const FUNC: u32 = 12;

/// The maximum depth of anonymous members that are searched.
const DEPTH: u32 = 8;
/// The maximum number of members that a search reads. No structure has nearly as many; the limit is for
/// invalid BTF, in which structures contain each other.
const LOOKS: u32 = 100_000;

/// The parsed BTF.
pub(super) struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// The offset of each type in `types`. The first type has the id 1.
    places: Vec<usize>,
}

/// An encoded type.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// True if members have the width of bit fields.
    flag: bool,
    /// The id of the type that this one refers to.
    of: u32,
    rest: &'a [u8],
    count: usize,
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Member {
    /// The offset from the start of the structure, in bytes.
    pub(super) offset: u32,
    /// The first bit of a bit field in that byte, counted from the lowest bit, or from the highest on
    /// big-endian machines; 0 for other members.
    pub(super) bit: u32,
    /// The number of bits of a bit field; 0 for other members.
    pub(super) width: u32,
    /// The id of the member's type.
    kind: u32,
}

impl<'a> Btf<'a> {
    /// Parses BTF; returns none if it is invalid.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, _) = <[u32; 6]>::read_from_prefix(bytes).ok()?;
        let [first, head, types, types_length, strings, strings_length] = header;
        let [a, b, _, _] = first.to_ne_bytes();
        if u16::from_ne_bytes([a, b]) != MAGIC {
            return None;
        }
        let part = |offset: u32, length: u32| {
            let start = usize::try_from(head.checked_add(offset)?).ok()?;
            bytes.get(start..)?.get(..usize::try_from(length).ok()?)
        };
        let types = part(types, types_length)?;
        let strings = part(strings, strings_length)?;
        let mut btf = Self {
            types,
            strings,
            places: Vec::new(),
        };
        let mut place = 0;
        while place < types.len() {
            let length = length(types.get(place..)?)?;
            btf.places.push(place);
            place = place.checked_add(length)?;
        }
        Some(btf)
    }

    /// Returns the id of the first type with this kind and name.
    pub(super) fn find(&self, kind: Kind, name: &str) -> Option<u32> {
        (1..).zip(&self.places).find_map(|(id, place)| {
            let found = read(self.types.get(*place..)?)?;
            (found.kind == kind as u32 && self.is_named(found.name, name)).then_some(id)
        })
    }

    /// Returns a member of a structure, or of its anonymous members.
    pub(super) fn member(&self, id: u32, name: &str) -> Option<Member> {
        let mut looks = LOOKS;
        self.member_within(id, name, DEPTH, &mut looks)
    }

    /// Returns a member of a structure that is itself the member `outer`.
    pub(super) fn member_of(&self, outer: Member, name: &str) -> Option<Member> {
        let inner = self.member(outer.kind, name)?;
        Some(Member {
            offset: outer.offset.checked_add(inner.offset)?,
            ..inner
        })
    }

    fn member_within(&self, id: u32, name: &str, depth: u32, looks: &mut u32) -> Option<Member> {
        let depth = depth.checked_sub(1)?;
        let outer = self.type_of(id)?;
        match outer.kind {
            TYPEDEF | VOLATILE | CONST => return self.member_within(outer.of, name, depth, looks),
            STRUCT | UNION => {}
            _ => return None,
        }
        let members = outer.rest.chunks_exact(MEMBER).take(outer.count);
        for member in members {
            *looks = looks.checked_sub(1)?;
            let [own, kind, place] = <[u32; 3]>::read_from_bytes(member).ok()?;
            let (bits, width) = if outer.flag {
                (place & 0xff_ffff, place >> 24)
            } else {
                (place, 0)
            };
            let offset = bits / 8;
            if self.is_named(own, name) {
                return Some(Member {
                    offset,
                    bit: bits % 8,
                    width,
                    kind,
                });
            }
            if self.is_named(own, "")
                && let Some(inner) = self.member_within(kind, name, depth, looks)
            {
                let offset = offset.checked_add(inner.offset)?;
                return Some(Member { offset, ..inner });
            }
        }
        None
    }

    fn type_of(&self, id: u32) -> Option<Type<'a>> {
        let index = usize::try_from(id.checked_sub(1)?).ok()?;
        read(self.types.get(*self.places.get(index)?..)?)
    }

    fn is_named(&self, at: u32, name: &str) -> bool {
        let rest = usize::try_from(at)
            .ok()
            .and_then(|at| self.strings.get(at..));
        rest.and_then(|rest| rest.strip_prefix(name.as_bytes()))
            .is_some_and(|rest| rest.first() == Some(&0))
    }
}

fn read(bytes: &[u8]) -> Option<Type<'_>> {
    let ([name, info, of], rest) = <[u32; 3]>::read_from_prefix(bytes).ok()?;
    Some(Type {
        name,
        kind: info >> 24 & 0x1f,
        flag: info >> 31 != 0,
        of,
        rest,
        count: usize::try_from(info & 0xffff).ok()?,
    })
}

/// Returns the size of an encoded type in bytes (`btf_type_ops` of kernel/bpf/btf.c); none for an
/// unknown kind.
fn length(bytes: &[u8]) -> Option<usize> {
    let found = read(bytes)?;
    let each = |size: usize| found.count.checked_mul(size);
    let added = match found.kind {
        // Pointers, forward declarations, qualifiers, functions, floats, type tags.
        2 | 7 | TYPEDEF | VOLATILE | CONST | 11 | FUNC | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        STRUCT | UNION => each(MEMBER)?,
        // Enumerations, parameters.
        6 | 13 => each(8)?,
        // Data sections, 64-bit enumerations.
        15 | 19 => each(12)?,
        _ => return None,
    };
    TYPE.checked_add(added)
}

#[cfg(test)]
mod tests;
