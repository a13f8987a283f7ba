//! Finds atomic instructions that Linux 5.10 rejects. Its verifier accepts only a plain add, and checks dead
//! code too.

use crate::bpf_object::CodeSection;

/// Size of an instruction in bytes. Loading a 64-bit constant takes two instructions.
const INSTRUCTION: usize = 8;
/// Mask for the `BPF_CLASS` bits of an opcode.
const CLASS: u8 = 0x07;
/// `BPF_STX`.
const STORE: u8 = 0x03;
/// Mask for the `BPF_MODE` bits of an opcode.
const MODE: u8 = 0xe0;
/// `BPF_ATOMIC`.
const ATOMIC: u8 = 0xc0;
/// `BPF_LD | BPF_IMM | BPF_DW`.
const LOAD_CONSTANT: u8 = 0x18;
/// `BPF_ADD`, without `BPF_FETCH`.
const ADD: i32 = 0x00;
/// `BPF_STX | BPF_ATOMIC` for 32 and 64 bits, the sizes that have a plain add.
const ATOMIC_32_AND_64: [u8; 2] = [0xc3, 0xdb];

/// An atomic instruction other than a plain add.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct RefusedInstruction {
    pub(crate) section: String,
    pub(crate) function: String,
    /// Index of the instruction within its section, as `llvm-objdump` prints it.
    pub(crate) instruction: usize,
    pub(crate) operation: &'static str,
}

/// Returns all instructions in a section that Linux 5.10 rejects.
pub(crate) fn find_refused(section: &CodeSection) -> Vec<RefusedInstruction> {
    let mut found = Vec::new();
    let (instructions, _) = section.bytes.as_chunks::<INSTRUCTION>();
    let mut instructions = instructions.iter().enumerate();
    while let Some((index, &[opcode, _, _, _, immediate @ ..])) = instructions.next() {
        if opcode == LOAD_CONSTANT {
            // Skip the next instruction, which is the second half of the constant.
            instructions.next();
            continue;
        }
        let immediate = i32::from_le_bytes(immediate);
        if opcode & CLASS == STORE
            && opcode & MODE == ATOMIC
            && !(ATOMIC_32_AND_64.contains(&opcode) && immediate == ADD)
        {
            let offset = u64::try_from(index * INSTRUCTION).unwrap_or(u64::MAX);
            found.push(RefusedInstruction {
                section: section.name.clone(),
                function: section.function_at(offset).to_owned(),
                instruction: index,
                operation: operation_name(immediate),
            });
        }
    }
    found
}

const fn operation_name(immediate: i32) -> &'static str {
    match immediate {
        0x00 => "add of 8 or 16 bits",
        0x01 => "add with fetch",
        0x40 => "or",
        0x41 => "or with fetch",
        0x50 => "and",
        0x51 => "and with fetch",
        0xa0 => "xor",
        0xa1 => "xor with fetch",
        0xe1 => "exchange",
        0xf1 => "compare and exchange",
        0x100 => "load with acquire",
        0x110 => "store with release",
        _ => "atomic of unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf_object::Function;

    const EXIT: [u8; 8] = [0x95, 0, 0, 0, 0, 0, 0, 0];

    fn section(instructions: &[[u8; 8]]) -> CodeSection {
        let function = |(name, offset): (&str, _)| Function {
            name: name.to_owned(),
            offset,
            size: 8,
        };
        CodeSection {
            name: "cgroup/connect4".to_owned(),
            bytes: instructions.concat(),
            functions: [("first", 0), ("second", 8)].map(function).into(),
        }
    }

    fn operations(instructions: &[[u8; 8]]) -> Vec<&'static str> {
        find_refused(&section(instructions))
            .into_iter()
            .map(|refused| refused.operation)
            .collect()
    }

    #[test]
    fn every_atomic_except_plain_add_is_refused_and_named() {
        for (opcode, immediate, name) in [
            (0xdb, 0_i32, None),
            (0xc3, 0, None),
            (0xdb, 0x01, Some("add with fetch")),
            (0xc3, 0xe1, Some("exchange")),
            (0xdb, 0xf1, Some("compare and exchange")),
            (0xdb, 0x40, Some("or")),
            (0xc3, 0x50, Some("and")),
            (0xdb, 0xa0, Some("xor")),
            (0xd3, 0x100, Some("load with acquire")),
        ] {
            let [a, b, c, d] = immediate.to_le_bytes();
            let found = operations(&[[opcode, 0x21, 0, 0, a, b, c, d]]);
            assert_eq!(found, Vec::from_iter(name), "{opcode:x} {immediate:x}");
        }
    }

    #[test]
    fn an_instruction_in_dead_code_is_refused_with_its_function_and_index() {
        let exchange = [0xdb, 0x21, 0, 0, 0xe1, 0, 0, 0];

        let found = find_refused(&section(&[EXIT, exchange]));

        let wanted = RefusedInstruction {
            section: "cgroup/connect4".to_owned(),
            function: "second".to_owned(),
            instruction: 1,
            operation: "exchange",
        };
        assert_eq!(found, [wanted]);
    }

    #[test]
    fn the_second_half_of_a_constant_is_skipped() {
        let constant = [0x18, 0x01, 0, 0, 0, 0, 0, 0];
        let looks_like_exchange = [0xdb, 0x21, 0, 0, 0xe1, 0, 0, 0];

        let found = operations(&[constant, looks_like_exchange, EXIT]);
        assert_eq!(found, Vec::<&str>::new());
    }
}
