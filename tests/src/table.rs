//! Tables in text, and times in them.

/// A head and lines whose cells stand below one another: the first and last to the left, numbers to
/// the right.
#[must_use]
pub fn in_columns<const N: usize>(
    head: [&str; N],
    lines: impl IntoIterator<Item = [String; N]>,
) -> String {
    let lines: Vec<_> = [head.map(str::to_owned)].into_iter().chain(lines).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for line in &lines {
        let cells = line
            .iter()
            .zip(widths)
            .enumerate()
            .map(|(column, (cell, width))| {
                if column == 0 {
                    format!("{cell:<width$}")
                } else if column + 1 == N {
                    cell.clone()
                } else {
                    format!("{cell:>width$}")
                }
            });
        let cells: Vec<_> = cells.collect();
        text.push_str(&format!("  {}\n", cells.join("  ").trim_end()));
    }
    text
}

/// Nanoseconds as microseconds with one decimal.
#[must_use]
pub fn microseconds(nanoseconds: u64) -> String {
    format!("{}.{} µs", nanoseconds / 1000, nanoseconds % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = in_columns(["a", "1", "x"], [["long", "200", "y"].map(str::to_owned)]);

        assert_eq!(text, "  a       1  x\n  long  200  y\n");
    }

    #[test]
    fn microseconds_keep_a_tenth() {
        assert_eq!(microseconds(12_345), "12.3 µs");
    }
}
