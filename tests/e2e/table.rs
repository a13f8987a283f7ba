//! What became of the specs.

use std::{fmt, time::Duration};

use tunnel_cluster::ginkgo::{Case, Verdict};

/// One spec.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) verdict: Verdict,
    pub(crate) took: Duration,
    /// Why it failed or was skipped.
    pub(crate) message: String,
}

impl From<Case> for Row {
    fn from(case: Case) -> Self {
        let Case {
            name,
            verdict,
            took,
            message,
            log: _,
        } = case;
        Self {
            name,
            verdict,
            took,
            message,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            Verdict::Passed => "ok",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
            Verdict::NotYet => "not yet",
        };
        write!(
            out,
            "{word:<8} {:>7.1}  {}",
            self.took.as_secs_f32(),
            self.name
        )
    }
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Row>,
}

impl Table {
    pub(crate) fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    pub(crate) fn failed(&self) -> usize {
        self.count(Verdict::Failed)
    }

    /// How many were not skipped.
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
    use super::*;

    #[test]
    fn the_last_line_counts_what_became_of_the_specs() {
        let mut table = Table::default();
        for verdict in [Verdict::Passed, Verdict::Failed, Verdict::Passed] {
            table.add(Row {
                name: "a Service answers".to_owned(),
                verdict,
                took: Duration::from_millis(1250),
                message: String::new(),
            });
        }

        let text = table.to_string();

        assert!(
            text.contains("FAILED       1.2  a Service answers\n"),
            "{text}"
        );
        assert!(
            text.ends_with("e2e: 2 passed, 1 failed, 0 not yet, 0 skipped\n"),
            "{text}"
        );
        assert_eq!(table.ran(), 3);
    }
}
