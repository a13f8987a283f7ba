//! Reads the code of a BPF object: its executable sections and their functions.

use std::path::Path;

use anyhow::{Context as _, Result};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SectionFlags, SymbolKind, elf};

/// An executable section in an object file.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct CodeSection {
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
    /// The functions in the section, sorted by offset.
    pub(crate) functions: Vec<Function>,
}

/// A function symbol.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Offset within the section, in bytes.
    pub(crate) offset: u64,
    /// Size in bytes.
    pub(crate) size: u64,
}

impl CodeSection {
    /// Name of the section that contains the functions that programs call; all other sections contain
    /// programs.
    pub(crate) const SUBPROGRAMS: &str = ".text";

    /// Returns the name of the function that contains the given byte offset.
    pub(crate) fn function_at(&self, offset: u64) -> &str {
        let function = self
            .functions
            .iter()
            .rev()
            .find(|function| function.offset <= offset);
        function.map_or("?", |function| &function.name)
    }
}

/// Reads the executable sections of an object file.
pub(crate) fn read_code(path: &Path) -> Result<Vec<CodeSection>> {
    let data = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = object::File::parse(&*data)
        .with_context(|| format!("{} is not an ELF object", path.display()))?;
    let mut all = Vec::new();
    for section in file.sections() {
        let SectionFlags::Elf { sh_flags } = section.flags() else {
            continue;
        };
        if sh_flags & u64::from(elf::SHF_EXECINSTR) == 0 || section.size() == 0 {
            continue;
        }
        let mut functions = Vec::new();
        for symbol in file.symbols() {
            if symbol.kind() == SymbolKind::Text && symbol.section_index() == Some(section.index())
            {
                let name = symbol.name()?.to_owned();
                functions.push(Function {
                    name,
                    offset: symbol.address(),
                    size: symbol.size(),
                });
            }
        }
        functions.sort_by_key(|function| function.offset);
        let bytes = section.data()?.to_owned();
        all.push(CodeSection {
            name: section.name()?.to_owned(),
            bytes,
            functions,
        });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_belongs_to_the_last_function_that_starts_before_it() {
        let function = |name: &str, offset| Function {
            name: name.to_owned(),
            offset,
            size: 16,
        };
        let section = CodeSection {
            name: ".text".to_owned(),
            bytes: vec![0; 32],
            functions: vec![function("first", 0), function("second", 16)],
        };

        assert_eq!(section.function_at(8), "first");
        assert_eq!(section.function_at(16), "second");
    }

    #[test]
    fn a_file_that_is_not_an_object_is_named() {
        let error = read_code(Path::new("/proc/self/cmdline")).expect_err("not ELF");

        assert!(format!("{error:#}").contains("/proc/self/cmdline is not an ELF object"));
    }
}
