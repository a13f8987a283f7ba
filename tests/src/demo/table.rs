//! The demonstration's table.

use crate::load::Report;

const HEAD: [&str; 6] = [
    "phase",
    "connections",
    "failures",
    "p50 connect",
    "p99 connect",
    "answered by",
];

/// One line per report, in columns.
#[must_use]
pub fn of(rows: &[(String, Report)]) -> String {
    let lines = rows.iter().map(|(name, report)| {
        [
            name.clone(),
            report.attempts.to_string(),
            report.failed().to_string(),
            microseconds(report.connect.p50_ns),
            microseconds(report.connect.p99_ns),
            distribution(report),
        ]
    });
    let lines: Vec<[String; 6]> = std::iter::once(HEAD.map(str::to_owned))
        .chain(lines)
        .collect();
    in_columns(&lines)
}

/// Lines whose cells stand below one another: the first and last to the left, numbers to the right.
#[must_use]
pub fn in_columns<const N: usize>(lines: &[[String; N]]) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for line in lines {
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

/// Who answered how often.
#[must_use]
pub fn distribution(report: &Report) -> String {
    let servers = report
        .servers
        .iter()
        .map(|(name, seen)| format!("{name} {}", seen.count));
    servers.collect::<Vec<_>>().join(", ")
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
        let lines = [["a", "1", "x"], ["long", "200", "y"]].map(|line| line.map(str::to_owned));

        assert_eq!(in_columns(&lines), "  a       1  x\n  long  200  y\n");
    }

    #[test]
    fn microseconds_keep_a_tenth() {
        assert_eq!(microseconds(12_345), "12.3 µs");
    }
}
