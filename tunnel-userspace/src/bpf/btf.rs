//! The kernel's description of its own types (`Documentation/bpf/btf.rst`), as far as it takes to
//! find a function, and a member of a structure. aya reads it too, but keeps members to itself. Pure.

use zerocopy::FromBytes as _;

/// Where the kernel tells it.
pub(super) const TYPES: &str = "/sys/kernel/btf/vmlinux";

/// What a type is; the kinds that are looked for here.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub(super) enum Kind {
    Struct = STRUCT,
    Function = FUNC,
}

const MAGIC: u16 = 0xeb9f;
/// Bytes of a type without what its kind adds, and of a member.
const TYPE: usize = 12;
const MEMBER: usize = 12;

const STRUCT: u32 = 4;
const UNION: u32 = 5;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const FUNC: u32 = 12;

/// How deep names without a structure of their own are looked through.
const DEPTH: u32 = 8;
/// How many members are looked at for one name: far more than any structure has with all its parts, and a
/// bound for a description in which parts hold each other.
const LOOKS: u32 = 100_000;

/// The description.
pub(super) struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// Where each type begins; the first has the number 1.
    places: Vec<usize>,
}

/// A type as it is written.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// Whether members give the size of bit fields as well.
    flag: bool,
    /// The type that this one is of.
    of: u32,
    rest: &'a [u8],
    count: usize,
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Member {
    /// Bytes from the beginning of the structure.
    pub(super) offset: u32,
    /// Where it begins in that byte, if it is a bit field: bits from the lowest on, or from the
    /// highest on where machines put the highest byte of a number first.
    pub(super) bit: u32,
    /// How many bits it has, if it is a bit field; else 0.
    pub(super) width: u32,
    /// The number of its type.
    kind: u32,
}

impl<'a> Btf<'a> {
    /// Takes a description; nothing if it is none.
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

    /// The number of the first type of a kind and name.
    pub(super) fn find(&self, kind: Kind, name: &str) -> Option<u32> {
        (1..).zip(&self.places).find_map(|(id, place)| {
            let found = read(self.types.get(*place..)?)?;
            (found.kind == kind as u32 && self.is_named(found.name, name)).then_some(id)
        })
    }

    /// A member of a structure, also one of a part of it that has no name.
    pub(super) fn member(&self, id: u32, name: &str) -> Option<Member> {
        let mut looks = LOOKS;
        self.member_within(id, name, DEPTH, &mut looks)
    }

    /// A member of the structure that a member is.
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

/// How many bytes a type takes (`btf_type_ops` of kernel/bpf/btf.c); nothing of a kind that is not
/// known.
fn length(bytes: &[u8]) -> Option<usize> {
    let found = read(bytes)?;
    let each = |size: usize| found.count.checked_mul(size);
    let added = match found.kind {
        // Pointers, names of other types, qualifiers, functions, floats, tags of types.
        2 | 7 | TYPEDEF | VOLATILE | CONST | 11 | FUNC | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        STRUCT | UNION => each(MEMBER)?,
        // Enumerations, parameters.
        6 | 13 => each(8)?,
        // Sections of data, large enumerations.
        15 | 19 => each(12)?,
        _ => return None,
    };
    TYPE.checked_add(added)
}

#[cfg(test)]
mod tests;
