//! Plain-text tables.

use std::{collections::BTreeMap, fmt, iter};

/// A headline with rows of a name and a value below it.
pub(super) struct Rows(String);

impl Rows {
    pub(super) const fn with_headline(headline: String) -> Self {
        Self(headline)
    }

    pub(super) fn add(&mut self, name: &str, value: impl fmt::Display) {
        self.0.push_str(&format!("\n  {name:<20}{value}"));
    }

    /// Adds one row for each value, all with the same name.
    pub(super) fn add_each<V: fmt::Display>(
        &mut self,
        name: &str,
        values: impl IntoIterator<Item = V>,
    ) {
        for value in values {
            self.add(name, value);
        }
    }

    /// Adds one row with all counts that are not zero, if any.
    pub(super) fn add_counts(&mut self, name: &str, counts: &BTreeMap<String, u64>) {
        let counted = counts.iter().filter(|(_, count)| **count > 0);
        let counted: Vec<_> = counted
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        if !counted.is_empty() {
            self.add(name, counted.join(", "));
        }
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns a value, or a dash if it is `None`.
pub(super) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Inserts a first column that has the name in the first row, and is empty in the others.
pub(super) fn with_name_column(
    name: String,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> impl Iterator<Item = Vec<String>> {
    let names = iter::once(name).chain(iter::repeat(String::new()));
    names.zip(rows).map(|(name, mut row)| {
        row.insert(0, name);
        row
    })
}

/// Renders a table with a header line; each column is as wide as its widest cell.
pub(super) fn render(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows
            .iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count());
        let head = head.get(column).map_or(0, |title| title.len());
        cells.max().unwrap_or(0).max(head)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        padded.join("   ").trim_end().to_owned()
    };
    let mut lines = vec![line(head.to_vec())];
    lines.extend(
        rows.iter()
            .map(|row| line(row.iter().map(String::as_str).collect())),
    );
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [
            vec!["a".to_owned(), "b".to_owned()],
            vec!["long".to_owned(), "c".to_owned()],
        ];

        assert_eq!(render(&["X", "Y"], &rows), "X      Y\na      b\nlong   c");
    }
}
