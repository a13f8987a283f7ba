//! The subcommand `culvert-lab attach-empty`, whose programs are the least that any pair of programs at tc can cost.
#![expect(clippy::print_stdout, reason = "the program prints reports")]

use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttachType, tc},
};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
    write::{Object, Symbol, SymbolSection},
};

/// The name of the program, of its section and of its function.
const SECTION: &[u8] = b"classifier";
const NAME: &[u8] = b"empty";

/// The instructions `r0 = -1` (`TC_ACT_UNSPEC`, so that the next program runs) and `exit`.
const INSTRUCTIONS: [u8; 16] = [
    0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x95, 0, 0, 0, 0, 0, 0, 0,
];

pub(crate) fn attach(links: &[String]) -> Result<()> {
    let mut ebpf = Ebpf::load(&object_file()?)?;
    let program = ebpf.program_mut("empty").context("no program")?;
    let program: &mut SchedClassifier = program.try_into()?;
    program.load()?;
    for link in links {
        // Only a kernel without links at tc needs the qdisc. An error means that it exists.
        drop(tc::qdisc_add_clsact(link));
        for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
            program.attach(link, direction)?;
        }
    }
    println!("attached");
    super::load::park()
}

/// Builds an object file that contains the program.
fn object_file() -> Result<Vec<u8>> {
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let section = object.add_section(Vec::new(), SECTION.to_vec(), SectionKind::Text);
    let license = object.add_section(Vec::new(), b"license".to_vec(), SectionKind::Data);
    object.append_section_data(license, b"GPL\0", 1);
    let value = object.append_section_data(section, &INSTRUCTIONS, 8);
    object.add_symbol(Symbol {
        name: NAME.to_vec(),
        value,
        size: 16,
        kind: SymbolKind::Text,
        scope: SymbolScope::Dynamic,
        weak: false,
        section: SymbolSection::Section(section),
        flags: SymbolFlags::None,
    });
    Ok(object.write()?)
}
