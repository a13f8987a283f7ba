//! Formats tables as plain text, and the times in them.

/// A column of a table: its heading, and a function that formats the column's cell for a row.
pub type Column<T> = (&'static str, fn(&T) -> String);

/// Formats a table: a line with the headings, then one line per row. The first and last columns are
/// left-aligned, all others are right-aligned.
#[must_use]
pub fn format_table<T>(rows: &[T], columns: &[Column<T>]) -> String {
    let mut lines = vec![String::new(); rows.len() + 1];
    for (number, (head, cell)) in columns.iter().enumerate() {
        let mut cells = vec![(*head).to_owned()];
        cells.extend(rows.iter().map(cell));
        let width = cells.iter().map(|cell| cell.chars().count()).max();
        let width = width.unwrap_or(0);
        let is_left = number == 0 || number + 1 == columns.len();
        for (line, cell) in lines.iter_mut().zip(cells) {
            let cell = if is_left {
                format!("  {cell:<width$}")
            } else {
                format!("  {cell:>width$}")
            };
            line.push_str(&cell);
        }
    }
    let lines = lines.iter().map(|line| format!("{}\n", line.trim_end()));
    lines.collect()
}

/// Formats a time in nanoseconds as microseconds, rounded to one decimal place.
#[must_use]
pub fn microseconds(nanoseconds: u64) -> String {
    let tenths = (nanoseconds + 50) / 100;
    format!("{}.{} µs", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_microseconds_are_rounded_to_one_decimal() {
        let text = format_table(
            &[("long", 12_250)],
            &[
                ("a", |row| row.0.to_owned()),
                ("1", |row| microseconds(row.1)),
                ("x", |_| "y".to_owned()),
            ],
        );

        assert_eq!(text, "  a           1  x\n  long  12.3 µs  y\n");
    }
}
