//! Renders tables of how long each test and each module took on each kernel.

use std::collections::{BTreeMap, BTreeSet};

use super::kernel_results::KernelResult;

/// Number of tests in the table of the slowest tests.
const SLOWEST: usize = 20;

/// The durations of a test or module by kernel, in seconds.
type Durations<'a> = BTreeMap<&'a str, f64>;

/// Renders the table of modules and the table of the slowest tests, as Markdown.
pub(super) fn tables(results: &[KernelResult]) -> String {
    let kernels: Vec<&str> = results.iter().map(|result| result.kernel).collect();
    let (mut tests, mut modules) = (BTreeMap::new(), BTreeMap::new());
    let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for result in results {
        for (test, seconds) in &result.report.seconds {
            let module = module(test);
            names.entry(module).or_default().insert(test);
            for durations in [
                tests.entry(test.as_str()).or_insert_with(Durations::new),
                modules.entry(module).or_insert_with(Durations::new),
            ] {
                *durations.entry(result.kernel).or_default() += seconds;
            }
        }
    }
    let label = |module: &str| {
        let count = names.get(module).map_or(0, BTreeSet::len);
        format!("{module} ({count})")
    };
    let modules = modules
        .into_iter()
        .map(|(name, durations)| (label(name), durations));
    let tests = tests
        .into_iter()
        .map(|(name, durations)| (name.to_owned(), durations));
    let mut text = table("module (tests)", &kernels, modules.collect(), usize::MAX);
    text.push('\n');
    text + &table("test", &kernels, tests.collect(), SLOWEST)
}

/// Returns a test's module, which is the first part of its name.
fn module(test: &str) -> &str {
    test.split("::").next().unwrap_or(test)
}

/// Renders a table with at most `limit` rows; those with the longest total duration come first.
fn table(
    heading: &str,
    kernels: &[&str],
    mut rows: Vec<(String, Durations<'_>)>,
    limit: usize,
) -> String {
    let sum = |durations: &Durations<'_>| durations.values().sum::<f64>();
    rows.sort_by(|one, other| sum(&other.1).total_cmp(&sum(&one.1)));
    let mut text = format!("| {heading} | {} |\n|---|", kernels.join(" | "));
    text += &"---|".repeat(kernels.len());
    text.push('\n');
    for (name, durations) in rows.iter().take(limit) {
        let cells = kernels.iter().map(|kernel| {
            let seconds = durations.get(kernel);
            seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{seconds:.1}"))
        });
        let cells: Vec<String> = cells.collect();
        text += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_module_and_test_are_first_and_a_test_that_did_not_run_has_no_figure() {
        let result = |kernel, seconds: &[(&str, f64)]| {
            let mut result = KernelResult::new(kernel, true);
            let seconds = seconds.iter().map(|(test, it)| ((*test).to_owned(), *it));
            result.report.seconds = seconds.collect();
            result
        };
        let results = [
            result("5.10", &[("a::x", 1.0), ("b::y", 2.0), ("b::z", 0.5)]),
            result("6.1", &[("a::x", 1.25)]),
        ];

        let text = tables(&results);

        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "| module (tests) | 5.10 | 6.1 |");
        assert_eq!(lines[2], "| b (2) | 2.5 | - |");
        assert_eq!(lines[3], "| a (1) | 1.0 | 1.2 |");
        assert_eq!(lines[7], "| a::x | 1.0 | 1.2 |");
    }
}
