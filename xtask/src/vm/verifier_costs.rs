//! Records what each program costs the verifier on each kernel, and compares this with earlier records, so
//! that growth is noticed before a kernel rejects a program.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::{generated_table::GeneratedTable, report::Report};
use crate::workspace;

/// The file with the recorded costs.
const FILE: &str = "tests/verifier.json";
/// The table of costs in docs/kernel-support.md.
const TABLE: GeneratedTable = GeneratedTable {
    page: "docs/kernel-support.md",
    mark: "<!-- written by cargo xtask vm --update -->\n",
};
const HEAD: &str = "\
| kernel | tested release | a refused connect | the guard of an uplink | most instructions, with logging | stack, with logging |
|---|---|---|---|---|---|
";

/// The kernel's limit on how many instructions the verifier processes (`BPF_COMPLEXITY_LIMIT_INSNS`).
const INSTRUCTION_LIMIT: u64 = 1_000_000;
/// The kernel's limit on the stack, in bytes (`MAX_BPF_STACK`).
const STACK_LIMIT: u64 = 512;
/// Percentages of the two limits that a program may use. The number of processed instructions differs between
/// kernels and between compiler releases. The stack differs slightly: Linux 7.3 rounds each function's frame
/// up to more bytes than earlier kernels do.
const MAX_PERCENT: [u64; 2] = [70, 94];
/// Permitted growth over the recorded value, in percent.
const MAX_GROWTH_PERCENT: u64 = 10;

/// The verifier's costs for one variant of a program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct ProgramCosts {
    /// Number of instructions that the verifier processes.
    instructions: u64,
    /// Stack size in bytes.
    stack: u64,
    /// Duration of the system call that loads the program.
    load_microseconds: u64,
}

/// Costs by program name and variant.
type Programs = BTreeMap<String, ProgramCosts>;

/// The features and costs that are recorded for a kernel.
#[derive(Debug, Default)]
struct KernelCosts {
    release: String,
    features: Value,
    programs: Programs,
}

/// The recorded costs, by kernel.
#[derive(Debug)]
pub(super) struct VerifierCosts {
    kernels: BTreeMap<String, KernelCosts>,
}

impl VerifierCosts {
    /// Reads the recorded costs.
    pub(super) fn read() -> Result<Self> {
        let text = fs::read_to_string(workspace::root().join(FILE))
            .with_context(|| format!("cannot read {FILE}"))?;
        Self::parse(&text).with_context(|| format!("cannot parse {FILE}"))
    }

    fn parse(text: &str) -> Result<Self> {
        let kernels: BTreeMap<String, Value> = serde_json::from_str(text)?;
        let kernels = kernels.into_iter().map(|(kernel, value)| {
            let release = value["release"].as_str().unwrap_or_default().to_owned();
            let programs = value["programs"].as_object().into_iter().flatten();
            let programs = programs.map(|(name, value)| (name.clone(), parse_costs(value)));
            let recorded = KernelCosts {
                release,
                features: value["features"].clone(),
                programs: programs.collect(),
            };
            (kernel, recorded)
        });
        Ok(Self {
            kernels: kernels.collect(),
        })
    }

    /// Replaces a kernel's recorded costs with those from a report.
    pub(super) fn record(&mut self, kernel: &str, release: &str, report: &Report) {
        let recorded = KernelCosts {
            release: release.to_owned(),
            features: report.features.clone(),
            programs: parse_programs(&report.verifier),
        };
        self.kernels.insert(kernel.to_owned(), recorded);
    }

    /// Writes the recorded costs, and the table of them in the documentation.
    pub(super) fn write(&self) -> Result<()> {
        let kernels = self.kernels.iter().map(|(kernel, recorded)| {
            let programs = recorded.programs.iter().map(|(name, costs)| {
                let value = json!({
                    "instructions": costs.instructions,
                    "stack": costs.stack,
                    "loadMicroseconds": costs.load_microseconds,
                });
                (name.clone(), value)
            });
            let programs: Map<String, Value> = programs.collect();
            let value = json!({
                "release": recorded.release,
                "features": recorded.features,
                "programs": programs,
            });
            (kernel.clone(), value)
        });
        let kernels: Map<String, Value> = kernels.collect();
        let text = serde_json::to_string_pretty(&kernels)? + "\n";
        fs::write(workspace::root().join(FILE), text)
            .with_context(|| format!("cannot write {FILE}"))?;
        println!("wrote {FILE}");
        TABLE.write(&self.table())
    }

    /// Renders the table for the documentation, with one row per kernel.
    fn table(&self) -> String {
        let row = |(kernel, recorded): (&String, &KernelCosts)| {
            let has = |feature: &str| recorded.features[feature] == true;
            let max = |plain: bool, cost: fn(&ProgramCosts) -> u64| {
                let programs = recorded.programs.iter();
                let programs = programs.filter(|(name, _)| is_plain(name) == plain);
                programs.map(|(_, costs)| cost(costs)).max().unwrap_or(0)
            };
            let cell = |cost| format!("{}, {}", max(true, cost), max(false, cost));
            let instructions = cell(|costs| costs.instructions);
            let stack = cell(|costs| costs.stack);
            let refusal = if has("setRetval") {
                "gets the error that the program sets (`bpf_set_retval`)"
            } else {
                "is redirected to an address that refuses it"
            };
            let guard = if has("tcx") {
                "a link (tcx)"
            } else {
                "a filter (clsact)"
            };
            let release = &recorded.release;
            format!("| {kernel} | {release} | {refusal} | {guard} | {instructions} | {stack} |\n")
        };
        let rows: String = self.kernels.iter().map(row).collect();
        format!("{HEAD}{rows}")
    }

    /// Returns the differences from the recorded costs, and the programs that are too close to a limit.
    pub(super) fn problems(
        &self,
        kernel: &str,
        release: &str,
        report: &Report,
    ) -> (Vec<String>, Vec<String>) {
        let measured = parse_programs(&report.verifier);
        if measured.is_empty() {
            let problem = "the report has no costs of the verifier".to_owned();
            return (Vec::new(), vec![problem]);
        }
        let empty = KernelCosts::default();
        let recorded = self.kernels.get(kernel).unwrap_or(&empty);
        let mut differences = Vec::new();
        if recorded.release == release && recorded.features != report.features {
            differences.push(format!(
                "the kernel has the features {}, but {FILE} has {}: run `cargo xtask vm --update`",
                report.features, recorded.features
            ));
        }
        let (grown, large) = compare(&recorded.programs, &measured);
        differences.extend(grown);
        (differences, large)
    }
}

/// Returns the programs that have grown too much, are not recorded or were not measured, and the programs
/// that are too close to a limit.
fn compare(recorded: &Programs, measured: &Programs) -> (Vec<String>, Vec<String>) {
    let (mut differences, mut large) = (Vec::new(), Vec::new());
    for (name, costs) in measured {
        let values = |costs: &ProgramCosts| [costs.instructions, costs.stack];
        let limits = ["instructions", "bytes of stack"]
            .into_iter()
            .zip([INSTRUCTION_LIMIT, STACK_LIMIT]);
        for (((unit, limit), percent), now) in limits.clone().zip(MAX_PERCENT).zip(values(costs)) {
            if now * 100 > limit * percent {
                large.push(format!(
                    "{name}: {now} {unit}, more than {percent} % of the limit {limit}"
                ));
            }
        }
        let Some(before) = recorded.get(name) else {
            differences.push(format!(
                "{name} is not in {FILE}: run `cargo xtask vm --update`"
            ));
            continue;
        };
        for (((unit, _), now), before) in limits.zip(values(costs)).zip(values(before)) {
            if now * 100 > before * (100 + MAX_GROWTH_PERCENT) {
                differences.push(format!(
                    "{name}: {now} {unit}, over {MAX_GROWTH_PERCENT} % more than the recorded {before}"
                ));
            }
        }
    }
    for name in recorded.keys().filter(|name| !measured.contains_key(*name)) {
        differences.push(format!("{name} is in {FILE}, but was not measured"));
    }
    (differences, large)
}

fn parse_costs(value: &Value) -> ProgramCosts {
    // A missing number counts as larger than any limit.
    let number = |name: &str| value[name].as_u64().unwrap_or(u64::MAX >> 8);
    ProgramCosts {
        instructions: number("instructions"),
        stack: number("stack"),
        load_microseconds: number("loadMicroseconds"),
    }
}

/// Parses the costs that `culvert-lab verify` reports.
fn parse_programs(reported: &[Value]) -> Programs {
    let parse = |value: &Value| {
        let [program, variant] = ["program", "variant"].map(|name| {
            let text = value[name].as_str();
            text.unwrap_or("?").to_owned()
        });
        (
            format!("{program} {variant}").trim().to_owned(),
            parse_costs(value),
        )
    };
    reported.iter().map(parse).collect()
}

/// Returns true if a program does not log events.
fn is_plain(name: &str) -> bool {
    !name.ends_with("-logged")
}

/// Renders a table of each kernel's costs and load times, for the terminal.
pub(super) fn table<'a>(kernels: impl Iterator<Item = (&'a str, &'a [Value])>) -> String {
    let kernels: Vec<(&str, Programs)> = kernels
        .map(|(kernel, reported)| (kernel, parse_programs(reported)))
        .filter(|(_, programs)| !programs.is_empty())
        .collect();
    let programs = kernels.iter().flat_map(|(_, programs)| programs.keys());
    let mut names: Vec<&String> = programs.collect();
    // The programs that log events would make the table too long; they are in the file.
    names.retain(|name| is_plain(name));
    names.sort();
    names.dedup();
    let mut text = format!("{:<44}", "instructions / stack / microseconds to load");
    for (kernel, _) in &kernels {
        text.push_str(&format!(" {kernel:>20}"));
    }
    for name in names {
        text.push_str(&format!("\n{name:<44}"));
        for (_, programs) in &kernels {
            let cell = programs.get(name).map_or_else(
                || "-".to_owned(),
                |costs| {
                    format!(
                        "{} / {} / {}",
                        costs.instructions, costs.stack, costs.load_microseconds
                    )
                },
            );
            text.push_str(&format!(" {cell:>20}"));
        }
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(instructions: u64, stack: u64) -> Report {
        let program = json!({
            "program": "connect4",
            "variant": "plain",
            "instructions": instructions,
            "stack": stack,
            "loadMicroseconds": 100,
        });
        Report {
            verifier: vec![program],
            ..Report::default()
        }
    }

    #[test]
    fn the_table_in_the_documents_has_the_recorded_costs() {
        let costs = VerifierCosts::read().expect("the file");
        let page = fs::read_to_string(workspace::root().join(TABLE.page)).expect("the page");

        assert_eq!(
            TABLE.with(&page, |_| costs.table()).as_deref(),
            Some(&*page)
        );
    }

    #[test]
    fn growth_over_ten_percent_use_near_a_limit_and_unrecorded_costs_are_problems() {
        let mut costs = VerifierCosts::parse("{}").expect("empty");
        let problems = |costs: &VerifierCosts, report: &Report| {
            let (differences, large) = costs.problems("6.1", "6.1.0", report);
            (differences.len(), large.len())
        };
        assert_eq!(problems(&costs, &report(1000, 200)), (1, 0));
        costs.record("6.1", "6.1.0", &report(1000, 200));

        assert_eq!(problems(&costs, &report(1100, 220)), (0, 0));
        assert_eq!(problems(&costs, &report(1101, 200)), (1, 0));
        assert_eq!(problems(&costs, &report(1000, 221)), (1, 0));
        assert_eq!(problems(&costs, &Report::default()), (0, 1));
        let other = Report {
            features: json!({ "tcx": true }),
            ..report(1000, 200)
        };
        assert_eq!(problems(&costs, &other), (1, 0));

        costs.record("6.1", "6.1.0", &report(700_001, 482));
        assert_eq!(problems(&costs, &report(700_001, 482)), (0, 2));
    }
}
