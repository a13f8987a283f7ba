//! Collects the tests' results, and prints them as a table.

use std::fmt;

use tunnel_cluster::ginkgo::{SpecResult, Verdict};

/// The results of all tests.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResultTable {
    rows: Vec<SpecResult>,
}

impl ResultTable {
    pub(crate) fn add(&mut self, row: SpecResult) {
        self.rows.push(row);
    }

    /// Returns the number of failed tests.
    pub(crate) fn failed(&self) -> usize {
        self.count(Verdict::Failed)
    }

    /// Returns the number of tests that ran.
    pub(crate) fn ran(&self) -> usize {
        self.failed() + self.count(Verdict::Passed)
    }

    fn count(&self, verdict: Verdict) -> usize {
        let rows = self.rows.iter();
        rows.filter(|row| row.verdict == verdict).count()
    }
}

impl fmt::Display for ResultTable {
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
            "e2e: {} passed, {} failed, {} skipped",
            self.count(Verdict::Passed),
            self.failed(),
            self.count(Verdict::Skipped)
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_last_line_has_the_number_of_specs_with_each_verdict() {
        let mut table = ResultTable::default();
        for verdict in [Verdict::Passed, Verdict::Failed, Verdict::Passed] {
            let took = Duration::from_millis(1250);
            table.add(SpecResult::new(
                "a Service answers",
                verdict,
                took,
                String::new(),
            ));
        }

        let text = table.to_string();

        let line = "FAILED       1.2  a Service answers\n";
        assert!(text.contains(line), "{text}");
        let last = "e2e: 2 passed, 1 failed, 0 skipped\n";
        assert!(text.ends_with(last), "{text}");
        assert_eq!(table.ran(), 3);
    }
}
