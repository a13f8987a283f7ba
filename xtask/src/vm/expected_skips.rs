//! Reads which tests each kernel is expected to skip because it lacks a feature.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};

use super::report::Skip;
use crate::workspace;

/// The file of expected skips: each line names a kernel, a test and a feature.
const FILE: &str = "tests/expected-skips.txt";

/// The expected skips, each with its kernel.
#[derive(Debug)]
pub(super) struct ExpectedSkips(BTreeSet<(String, Skip)>);

pub(super) fn read() -> Result<ExpectedSkips> {
    let path = workspace::root().join(FILE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
    parse(&text)
}

fn parse(text: &str) -> Result<ExpectedSkips> {
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let lines = lines.map(|line| {
        let mut words = line.split_whitespace();
        let mut word = || words.next().map(str::to_owned);
        let (kernel, test, feature) = (word(), word(), word());
        let fields = kernel.zip(test).zip(feature);
        let ((kernel, test), feature) = fields.with_context(|| {
            format!("{FILE}: the line `{line}` is not of the form `kernel test feature`")
        })?;
        Ok((kernel, Skip { test, feature }))
    });
    Ok(ExpectedSkips(lines.collect::<Result<_>>()?))
}

impl ExpectedSkips {
    /// Returns a kernel's unexpected skips and, after a complete run, also the expected skips that did not
    /// occur.
    pub(super) fn problems(&self, kernel: &str, skips: &[Skip], is_complete: bool) -> Vec<String> {
        let of_kernel = self.0.iter().filter(|(name, _)| name == kernel);
        let expected: BTreeSet<&Skip> = of_kernel.map(|(_, skip)| skip).collect();
        let actual: BTreeSet<&Skip> = skips.iter().collect();
        let mut problems: Vec<String> = actual
            .difference(&expected)
            .map(|skip| {
                format!(
                    "{} was skipped, since the kernel lacks {}: not expected in {FILE}",
                    skip.test, skip.feature
                )
            })
            .collect();
        if is_complete {
            problems.extend(expected.difference(&actual).map(|skip| {
                format!(
                    "{} was not skipped, though {FILE} has a line for it and {}: remove the line",
                    skip.test, skip.feature
                )
            }));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(test: &str, feature: &str) -> Skip {
        Skip {
            test: test.to_owned(),
            feature: feature.to_owned(),
        }
    }

    #[test]
    fn an_unlisted_skip_is_a_problem_and_so_is_a_listed_one_that_did_not_occur() {
        let expected = parse("# why\n5.10 a::b tcx\n\n6.1 a::b tcx\n").expect("a list");

        let listed = [skip("a::b", "tcx")];
        let both = [skip("a::b", "tcx"), skip("a::c", "sctp")];
        assert!(expected.problems("5.10", &listed, true).is_empty());
        assert_eq!(expected.problems("5.10", &[], true).len(), 1);
        assert!(expected.problems("5.10", &[], false).is_empty());
        assert_eq!(
            expected.problems("5.10", &both, true),
            [
                "a::c was skipped, since the kernel lacks sctp: not expected in \
                 tests/expected-skips.txt"
            ]
        );
        assert_eq!(expected.problems("6.12", &listed, true).len(), 1);
    }

    #[test]
    fn an_incomplete_line_is_refused() {
        parse("5.10 a::b").expect_err("no feature");
    }
}
