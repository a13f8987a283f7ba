//! Parses the kernel's BTF, the description of its types (`Documentation/bpf/btf.rst`), to find functions and
//! the members of structures. aya parses BTF, too, but doesn't expose members. Pure.

use zerocopy::FromBytes as _;

/// The file that contains the kernel's BTF.
pub(super) const VMLINUX_BTF: &str = "/sys/kernel/btf/vmlinux";

/// The kinds of types that can be searched for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub(super) enum TypeKind {
    Struct = STRUCT,
    Function = FUNC,
}

const MAGIC: u16 = 0xeb9f;
/// The sizes in bytes of an encoded type, without the data that depends on its kind, and of an encoded
/// member.
const TYPE_SIZE: usize = 12;
const MEMBER_SIZE: usize = 12;

const STRUCT: u32 = 4;
const UNION: u32 = 5;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const FUNC: u32 = 12;

/// The maximum nesting depth to which anonymous members are searched.
const MAX_DEPTH: u32 = 8;
/// The maximum number of members that a search reads. No structure has nearly as many; the limit bounds the
/// search if the BTF is invalid and its structures contain each other.
const MAX_MEMBERS: u32 = 100_000;

/// The parsed BTF.
pub(super) struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// The offset of each type in `types`. The first type has id 1.
    offsets: Vec<usize>,
}

/// An encoded type: its header fields, and the bytes that follow them.
struct Type<'a> {
    name: u32,
    kind: u32,
    /// True if each member's offset also encodes a bit-field width.
    has_bit_fields: bool,
    /// The id of the type that this one refers to.
    referenced: u32,
    rest: &'a [u8],
    count: usize,
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Member {
    /// The offset from the start of the structure, in bytes.
    pub(super) offset: u32,
    /// The position of a bit field's first bit in the byte at `offset`, counted from the lowest bit, or from
    /// the highest on big-endian machines; 0 for other members.
    pub(super) bit: u32,
    /// The width of a bit field in bits; 0 for other members.
    pub(super) width: u32,
    /// The id of the member's type.
    type_id: u32,
}

impl<'a> Btf<'a> {
    /// Parses BTF; returns `None` if it is invalid.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, _) = <[u32; 6]>::read_from_prefix(bytes).ok()?;
        let [
            magic,
            header_length,
            types,
            types_length,
            strings,
            strings_length,
        ] = header;
        let [a, b, _, _] = magic.to_ne_bytes();
        if u16::from_ne_bytes([a, b]) != MAGIC {
            return None;
        }
        let section = |offset: u32, length: u32| {
            let start = usize::try_from(header_length.checked_add(offset)?).ok()?;
            bytes.get(start..)?.get(..usize::try_from(length).ok()?)
        };
        let types = section(types, types_length)?;
        let strings = section(strings, strings_length)?;
        let mut btf = Self {
            types,
            strings,
            offsets: Vec::new(),
        };
        let mut offset = 0;
        while offset < types.len() {
            let length = encoded_size(types.get(offset..)?)?;
            btf.offsets.push(offset);
            offset = offset.checked_add(length)?;
        }
        Some(btf)
    }

    /// Returns the id of the first type with this kind and name.
    pub(super) fn find(&self, kind: TypeKind, name: &str) -> Option<u32> {
        (1..).zip(&self.offsets).find_map(|(id, offset)| {
            let found = read_type(self.types.get(*offset..)?)?;
            (found.kind == kind as u32 && self.is_named(found.name, name)).then_some(id)
        })
    }

    /// Finds a member of a structure by name, searching its anonymous members, too.
    pub(super) fn member(&self, id: u32, name: &str) -> Option<Member> {
        let mut budget = MAX_MEMBERS;
        self.member_within(id, name, MAX_DEPTH, &mut budget)
    }

    /// Finds a member inside the member `outer`, which is itself a structure. The returned offset is from the
    /// start of the structure that contains `outer`.
    pub(super) fn member_of(&self, outer: Member, name: &str) -> Option<Member> {
        let inner = self.member(outer.type_id, name)?;
        Some(Member {
            offset: outer.offset.checked_add(inner.offset)?,
            ..inner
        })
    }

    fn member_within(&self, id: u32, name: &str, depth: u32, budget: &mut u32) -> Option<Member> {
        let depth = depth.checked_sub(1)?;
        let outer = self.type_of(id)?;
        match outer.kind {
            TYPEDEF | VOLATILE | CONST => {
                return self.member_within(outer.referenced, name, depth, budget);
            }
            STRUCT | UNION => {}
            _ => return None,
        }
        let members = outer.rest.chunks_exact(MEMBER_SIZE).take(outer.count);
        for member in members {
            *budget = budget.checked_sub(1)?;
            let [member_name, type_id, position] = <[u32; 3]>::read_from_bytes(member).ok()?;
            let (bits, width) = if outer.has_bit_fields {
                (position & 0xff_ffff, position >> 24)
            } else {
                (position, 0)
            };
            let offset = bits / 8;
            if self.is_named(member_name, name) {
                return Some(Member {
                    offset,
                    bit: bits % 8,
                    width,
                    type_id,
                });
            }
            if self.is_named(member_name, "")
                && let Some(inner) = self.member_within(type_id, name, depth, budget)
            {
                let offset = offset.checked_add(inner.offset)?;
                return Some(Member { offset, ..inner });
            }
        }
        None
    }

    fn type_of(&self, id: u32) -> Option<Type<'a>> {
        let index = usize::try_from(id.checked_sub(1)?).ok()?;
        read_type(self.types.get(*self.offsets.get(index)?..)?)
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.strings.get(offset..));
        rest.and_then(|rest| rest.strip_prefix(name.as_bytes()))
            .is_some_and(|rest| rest.first() == Some(&0))
    }
}

fn read_type(bytes: &[u8]) -> Option<Type<'_>> {
    let ([name, info, referenced], rest) = <[u32; 3]>::read_from_prefix(bytes).ok()?;
    Some(Type {
        name,
        kind: info >> 24 & 0x1f,
        has_bit_fields: info >> 31 != 0,
        referenced,
        rest,
        count: usize::try_from(info & 0xffff).ok()?,
    })
}

/// Returns the size of an encoded type in bytes (see `btf_type_ops` in kernel/bpf/btf.c); `None` if its kind
/// is unknown.
fn encoded_size(bytes: &[u8]) -> Option<usize> {
    let found = read_type(bytes)?;
    let each = |size: usize| found.count.checked_mul(size);
    let added = match found.kind {
        // Pointers, forward declarations, qualifiers, functions, floats, type tags.
        2 | 7 | TYPEDEF | VOLATILE | CONST | 11 | FUNC | 16 | 18 => 0,
        // Integers, variables, declaration tags.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        STRUCT | UNION => each(MEMBER_SIZE)?,
        // Enumerations, parameters.
        6 | 13 => each(8)?,
        // Data sections, 64-bit enumerations.
        15 | 19 => each(12)?,
        _ => return None,
    };
    TYPE_SIZE.checked_add(added)
}

#[cfg(test)]
mod tests;
