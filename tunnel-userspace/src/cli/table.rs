//! Renders plain-text tables.

use std::iter;

/// Formats a value, or returns a dash if it is `None`.
pub(super) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Inserts a first column that contains the name in the first row, and is empty in the others.
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
