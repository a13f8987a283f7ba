//! A program at tc that does nothing: the least that any program there can cost.

use anyhow::{Context as _, Result};
use aya::{Ebpf, programs::SchedClassifier};
use object::{
    Architecture, BinaryFormat, Endianness, SectionKind, SymbolFlags, SymbolKind, SymbolScope,
    write::{Object, Symbol, SymbolSection},
};

/// The name of the program's section, from which the loader takes its type.
const SECTION: &[u8] = b"classifier";
const NAME: &str = "empty";

/// The instructions `r0 = -1` (`TC_ACT_UNSPEC`, so that the next program runs) and `exit`.
const INSTRUCTIONS: [u8; 16] = [
    0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x95, 0, 0, 0, 0, 0, 0, 0,
];

/// A loaded program that does nothing.
#[derive(Debug)]
pub struct EmptyProgram(Ebpf);

impl EmptyProgram {
    /// Loads the program.
    pub fn load() -> Result<Self> {
        let mut loaded = Self(Ebpf::load(&object_file()?)?);
        loaded.program()?.load()?;
        Ok(loaded)
    }

    /// Returns the program.
    pub fn program(&mut self) -> Result<&mut SchedClassifier> {
        let program = self.0.program_mut(NAME).context("no program")?;
        Ok(program.try_into()?)
    }
}

/// Builds an object file that contains the program.
fn object_file() -> Result<Vec<u8>> {
    let mut object = Object::new(BinaryFormat::Elf, Architecture::Bpf, Endianness::Little);
    let section = object.add_section(Vec::new(), SECTION.to_vec(), SectionKind::Text);
    let license = object.add_section(Vec::new(), b"license".to_vec(), SectionKind::Data);
    object.append_section_data(license, b"GPL\0", 1);
    let value = object.append_section_data(section, &INSTRUCTIONS, 8);
    object.add_symbol(Symbol {
        name: NAME.as_bytes().to_vec(),
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
