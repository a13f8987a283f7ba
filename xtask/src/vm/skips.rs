//! The tests that a kernel is expected to skip, because it lacks a feature.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};

use super::report::Skip;
use crate::workspace;

/// The file, with lines of kernel, test and feature.
const FILE: &str = "tests/expected-skips.txt";

/// The expected skips.
#[derive(Debug)]
pub(super) struct Expected {
    lines: BTreeSet<(String, Skip)>,
}

pub(super) fn read() -> Result<Expected> {
    let path = workspace::root().join(FILE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
    parse(&text)
}

fn parse(text: &str) -> Result<Expected> {
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let lines = lines.map(|line| {
        let mut words = line.split_whitespace();
        let mut word = || words.next().map(str::to_owned);
        let (kernel, test, feature) = (word(), word(), word());
        let whole = kernel.zip(test).zip(feature);
        let ((kernel, test), feature) =
            whole.with_context(|| format!("{FILE}: `{line}` is not kernel, test and feature"))?;
        Ok((kernel, Skip { test, feature }))
    });
    Ok(Expected {
        lines: lines.collect::<Result<_>>()?,
    })
}

impl Expected {
    /// Returns the unexpected skips of a kernel; for a complete run also the expected skips that did not
    /// occur.
    pub(super) fn problems(&self, kernel: &str, seen: &[Skip], is_whole: bool) -> Vec<String> {
        let of_kernel = self.lines.iter().filter(|(name, _)| name == kernel);
        let expected: BTreeSet<&Skip> = of_kernel.map(|(_, skip)| skip).collect();
        let seen: BTreeSet<&Skip> = seen.iter().collect();
        let mut problems: Vec<String> = seen
            .difference(&expected)
            .map(|skip| format!("{} skipped for {}: not in {FILE}", skip.test, skip.feature))
            .collect();
        if is_whole {
            problems.extend(expected.difference(&seen).map(|skip| {
                format!(
                    "{} not skipped for {}: take it out of {FILE}",
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
    fn a_skip_that_is_not_listed_is_a_problem_and_so_is_a_listed_one_that_did_not_happen() {
        let expected = parse("# why\n5.10 a::b tcx\n\n6.1 a::b tcx\n").expect("a list");

        let listed = [skip("a::b", "tcx")];
        let both = [skip("a::b", "tcx"), skip("a::c", "sctp")];
        assert!(expected.problems("5.10", &listed, true).is_empty());
        assert_eq!(expected.problems("5.10", &[], true).len(), 1);
        assert!(expected.problems("5.10", &[], false).is_empty());
        assert_eq!(
            expected.problems("5.10", &both, true),
            ["a::c skipped for sctp: not in tests/expected-skips.txt"]
        );
        assert_eq!(expected.problems("6.12", &listed, true).len(), 1);
    }

    #[test]
    fn a_line_that_is_not_whole_is_refused() {
        parse("5.10 a::b").expect_err("no feature");
    }
}
