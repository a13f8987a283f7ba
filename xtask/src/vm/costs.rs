//! The seconds of each test and each module, by kernel.

use std::collections::{BTreeMap, BTreeSet};

use super::{page, table::Row};

/// The number of listed tests: those that take longest.
const MOST: usize = 20;

/// The table in the documents.
const PAGE: page::Table = page::Table {
    page: "docs/testing.md",
    mark: "<!-- costs, written by cargo xtask vm --whole --update -->\n",
};

/// The seconds of a test or module on each kernel.
type Costs<'a> = BTreeMap<&'a str, f64>;

/// Renders the tables of modules and of the slowest tests, as Markdown.
pub(super) fn tables(rows: &[Row]) -> String {
    let kernels: Vec<&str> = rows.iter().map(|row| row.kernel).collect();
    let (mut tests, mut modules) = (BTreeMap::new(), BTreeMap::new());
    let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for row in rows {
        for (test, seconds) in &row.report.seconds {
            let module = module(test);
            names.entry(module).or_default().insert(test);
            for costs in [
                tests.entry(test.as_str()).or_insert_with(Costs::new),
                modules.entry(module).or_insert_with(Costs::new),
            ] {
                *costs.entry(row.kernel).or_default() += seconds;
            }
        }
    }
    let label = |module: &str| {
        let count = names.get(module).map_or(0, BTreeSet::len);
        format!("{module} ({count})")
    };
    let modules = modules.into_iter().map(|(it, costs)| (label(it), costs));
    let tests = tests.into_iter().map(|(it, costs)| (it.to_owned(), costs));
    let mut text = table("module (tests)", &kernels, modules.collect(), usize::MAX);
    text.push('\n');
    text + &table("test", &kernels, tests.collect(), MOST)
}

/// Writes the tables into the documents.
pub(super) fn write(rows: &[Row]) -> anyhow::Result<()> {
    PAGE.write(&tables(rows))
}

/// Returns the module in a test's name.
fn module(test: &str) -> &str {
    test.split("::").next().unwrap_or(test)
}

fn table(what: &str, kernels: &[&str], mut rows: Vec<(String, Costs<'_>)>, most: usize) -> String {
    let sum = |costs: &Costs<'_>| costs.values().sum::<f64>();
    rows.sort_by(|one, other| sum(&other.1).total_cmp(&sum(&one.1)));
    let mut text = format!("| {what} | {} |\n|---|", kernels.join(" | "));
    text += &"---|".repeat(kernels.len());
    text.push('\n');
    for (name, costs) in rows.iter().take(most) {
        let cells = kernels.iter().map(|kernel| {
            let seconds = costs.get(kernel);
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
    fn the_dearest_module_and_test_stand_first_and_what_did_not_run_has_no_figure() {
        let row = |kernel, seconds: &[(&str, f64)]| {
            let mut row = Row::new(kernel, true);
            let seconds = seconds.iter().map(|(test, it)| ((*test).to_owned(), *it));
            row.report.seconds = seconds.collect();
            row
        };
        let rows = [
            row("5.10", &[("a::x", 1.0), ("b::y", 2.0), ("b::z", 0.5)]),
            row("6.1", &[("a::x", 1.25)]),
        ];

        let text = tables(&rows);

        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "| module (tests) | 5.10 | 6.1 |");
        assert_eq!(lines[2], "| b (2) | 2.5 | - |");
        assert_eq!(lines[3], "| a (1) | 1.0 | 1.2 |");
        assert_eq!(lines[7], "| a::x | 1.0 | 1.2 |");
    }
}
