//! The table of results.

use std::fmt;

use tunnel_cluster::ginkgo::{Case, Verdict};

/// The results of all specs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Case>,
}

impl Table {
    pub(crate) fn add(&mut self, row: Case) {
        self.rows.push(row);
    }

    pub(crate) fn failed(&self) -> usize {
        self.count(Verdict::Failed)
    }

    /// Returns the number of specs that were not skipped.
    pub(crate) fn ran(&self) -> usize {
        self.failed() + self.count(Verdict::Passed) + self.count(Verdict::NotYet)
    }

    fn count(&self, verdict: Verdict) -> usize {
        let rows = self.rows.iter();
        rows.filter(|row| row.verdict == verdict).count()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "\n{:<8} {:>7}  spec", "result", "seconds")?;
        for row in &self.rows {
            writeln!(out, "{row}")?;
            for line in row.message.lines() {
                writeln!(out, "{:>18}{line}", "")?;
            }
        }
        writeln!(
            out,
            "e2e: {} passed, {} failed, {} not yet, {} skipped",
            self.count(Verdict::Passed),
            self.failed(),
            self.count(Verdict::NotYet),
            self.count(Verdict::Skipped)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_line_counts_what_became_of_the_specs() {
        let mut table = Table::default();
        for verdict in [Verdict::Passed, Verdict::Failed, Verdict::Passed] {
            let took = Duration::from_millis(1250);
            table.add(Case::new("a Service answers", verdict, took, String::new()));
        }

        let text = table.to_string();

        let line = "FAILED       1.2  a Service answers\n";
        assert!(text.contains(line), "{text}");
        let last = "e2e: 2 passed, 1 failed, 0 not yet, 0 skipped\n";
        assert!(text.ends_with(last), "{text}");
        assert_eq!(table.ran(), 3);
    }
}
