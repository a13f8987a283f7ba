//! Writes generated tables into the documentation.

use std::fs;

use anyhow::{Context as _, Result};

use crate::workspace;

const END: &str = "<!-- end -->\n";

/// The place of a generated table in the documentation.
#[derive(Debug)]
pub(super) struct GeneratedTable {
    /// Path of the page, relative to the workspace.
    pub(super) page: &'static str,
    /// Line above the table.
    pub(super) mark: &'static str,
}

impl GeneratedTable {
    /// Replaces the table on the page.
    pub(super) fn write(&self, text: &str) -> Result<()> {
        self.rewrite(|_| text.to_owned())
    }

    /// Replaces the table on the page by what a function returns for the current table.
    pub(super) fn rewrite(&self, new: impl FnOnce(&str) -> String) -> Result<()> {
        let path = workspace::root().join(self.page);
        let page =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", self.page))?;
        let page = self.with(&page, new);
        let page = page.with_context(|| {
            let (mark, end) = (self.mark.trim(), END.trim());
            format!("{} has no line `{mark}` followed by `{end}`", self.page)
        })?;
        fs::write(path, page).with_context(|| format!("cannot write {}", self.page))?;
        println!("wrote {}", self.page);
        Ok(())
    }

    /// Returns the page's text with a new table, or `None` if the page lacks one of the marks.
    pub(super) fn with(&self, page: &str, new: impl FnOnce(&str) -> String) -> Option<String> {
        let (before, rest) = page.split_once(self.mark)?;
        let (old, after) = rest.split_once(END)?;
        Some(format!("{before}{}{}{END}{after}", self.mark, new(old)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_text_between_the_marks_is_replaced() {
        let table = GeneratedTable {
            page: "docs/page.md",
            mark: "<!-- begin -->\n",
        };
        let page = format!("before\n{}old\n{END}after\n{END}", table.mark);

        let new = table.with(&page, |old| format!("{old}| 6.1 |\n"));

        let expected = format!("before\n{}old\n| 6.1 |\n{END}after\n{END}", table.mark);
        assert_eq!(new, Some(expected));
        assert_eq!(table.with("no marks", str::to_owned), None);
    }
}
