//! The costs of each program in the verifier of each kernel, recorded and compared: otherwise programs
//! grow unnoticed until a kernel refuses them.

use std::{collections::BTreeMap, fs};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::{page, report::Report};
use crate::workspace;

const FILE: &str = "tests/verifier.json";
/// The table of the costs in the documents.
const PAGE: page::Table = page::Table {
    page: "docs/kernel-support.md",
    mark: "<!-- written by cargo xtask vm --update -->\n",
};
const HEAD: &str = "\
| kernel | tested release | a refused connect | the guard of an uplink | most instructions, with logging | stack, with logging |
|---|---|---|---|---|---|
";

/// The verifier's limits on every kernel: processed instructions, and bytes of stack
/// (`BPF_COMPLEXITY_LIMIT_INSNS`, `MAX_BPF_STACK`).
const INSTRUCTIONS: u64 = 1_000_000;
const STACK: u64 = 512;
/// The part of each limit that a program may use, in percent. The number of processed instructions
/// differs between kernels and releases of the compiler; so does the stack, a little: Linux 7.3 rounds
/// the part of each function up to more bytes than earlier ones.
const MOST: [u64; 2] = [70, 94];
/// The permitted growth over the recorded value, in percent.
const GROWTH: u64 = 10;

/// The costs of a program in one of its variants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Measured {
    instructions: u64,
    stack: u64,
    /// The duration of the system call that loads it.
    load_microseconds: u64,
}

type Programs = BTreeMap<String, Measured>;

/// The record of a kernel.
#[derive(Debug, Default)]
struct Kernel {
    release: String,
    features: Value,
    programs: Programs,
}

/// The records, by kernel.
#[derive(Debug)]
pub(super) struct Budget {
    kernels: BTreeMap<String, Kernel>,
}

impl Budget {
    pub(super) fn read() -> Result<Self> {
        let text = fs::read_to_string(workspace::root().join(FILE))
            .with_context(|| format!("cannot read {FILE}"))?;
        Self::parse(&text).with_context(|| format!("{FILE} can't be read"))
    }

    fn parse(text: &str) -> Result<Self> {
        let kernels: BTreeMap<String, Value> = serde_json::from_str(text)?;
        let kernels = kernels.into_iter().map(|(kernel, value)| {
            let release = value["release"].as_str().unwrap_or_default().to_owned();
            let programs = value["programs"].as_object().into_iter().flatten();
            let programs = programs.map(|(name, value)| (name.clone(), measured(value)));
            let written = Kernel {
                release,
                features: value["features"].clone(),
                programs: programs.collect(),
            };
            (kernel, written)
        });
        Ok(Self {
            kernels: kernels.collect(),
        })
    }

    /// Replaces the record of a kernel by its measured costs.
    pub(super) fn take(&mut self, kernel: &str, release: &str, report: &Report) {
        let written = Kernel {
            release: release.to_owned(),
            features: report.features.clone(),
            programs: named(&report.verifier),
        };
        self.kernels.insert(kernel.to_owned(), written);
    }

    pub(super) fn write(&self) -> Result<()> {
        let kernels = self.kernels.iter().map(|(kernel, written)| {
            let programs = written.programs.iter().map(|(name, measured)| {
                let value = json!({
                    "instructions": measured.instructions,
                    "stack": measured.stack,
                    "loadMicroseconds": measured.load_microseconds,
                });
                (name.clone(), value)
            });
            let programs: Map<String, Value> = programs.collect();
            let whole = json!({
                "release": written.release,
                "features": written.features,
                "programs": programs,
            });
            (kernel.clone(), whole)
        });
        let whole: Map<String, Value> = kernels.collect();
        let text = serde_json::to_string_pretty(&whole)? + "\n";
        fs::write(workspace::root().join(FILE), text)
            .with_context(|| format!("cannot write {FILE}"))?;
        println!("{FILE} was written");
        PAGE.write(&self.text())
    }

    /// Returns the table in the documents: a line for each kernel.
    fn text(&self) -> String {
        let row = |(kernel, written): (&String, &Kernel)| {
            let has = |feature: &str| written.features[feature] == true;
            let most = |plain: bool, part: fn(&Measured) -> u64| {
                let programs = written.programs.iter();
                let programs = programs.filter(|(name, _)| is_plain(name) == plain);
                programs.map(|(_, it)| part(it)).max().unwrap_or(0)
            };
            let cell = |part| format!("{}, {}", most(true, part), most(false, part));
            let (most, stack) = (cell(|it| it.instructions), cell(|it| it.stack));
            let refusal = if has("setRetval") {
                "gets its own error (`bpf_set_retval`)"
            } else {
                "is sent to a place that refuses"
            };
            let guard = if has("tcx") {
                "a link (tcx)"
            } else {
                "a filter (clsact)"
            };
            let release = &written.release;
            format!("| {kernel} | {release} | {refusal} | {guard} | {most} | {stack} |\n")
        };
        let rows: String = self.kernels.iter().map(row).collect();
        format!("{HEAD}{rows}")
    }

    /// Returns the deviations from the record with excessive growth; and programs that are too large.
    pub(super) fn problems(
        &self,
        kernel: &str,
        release: &str,
        report: &Report,
    ) -> (Vec<String>, Vec<String>) {
        let measured = named(&report.verifier);
        if measured.is_empty() {
            return (Vec::new(), vec!["the verifier was not measured".to_owned()]);
        }
        let nothing = Kernel::default();
        let written = self.kernels.get(kernel).unwrap_or(&nothing);
        let mut old = Vec::new();
        if written.release == release && written.features != report.features {
            old.push(format!(
                "has {}, {FILE} says {}: `cargo xtask vm --update`",
                report.features, written.features
            ));
        }
        let (grown, large) = compare(&written.programs, &measured);
        old.extend(grown);
        (old, large)
    }
}

/// Returns programs that have grown too much or are only in one of both, and those that are too large.
fn compare(written: &Programs, measured: &Programs) -> (Vec<String>, Vec<String>) {
    let (mut problems, mut large) = (Vec::new(), Vec::new());
    for (name, now) in measured {
        let parts = |it: &Measured| [it.instructions, it.stack];
        let limits = ["instructions", "bytes of stack"]
            .into_iter()
            .zip([INSTRUCTIONS, STACK]);
        for (((what, limit), most), now) in limits.clone().zip(MOST).zip(parts(now)) {
            if now * 100 > limit * most {
                large.push(format!("{name}: {now} {what}, over {most} % of {limit}"));
            }
        }
        let Some(before) = written.get(name) else {
            problems.push(format!(
                "{name} is not in {FILE}: `cargo xtask vm --update`"
            ));
            continue;
        };
        for (((what, _), now), before) in limits.zip(parts(now)).zip(parts(before)) {
            if now * 100 > before * (100 + GROWTH) {
                problems.push(format!(
                    "{name}: {now} {what} in the place of {before}, over {GROWTH} % more"
                ));
            }
        }
    }
    for name in written.keys().filter(|name| !measured.contains_key(*name)) {
        problems.push(format!("{name} of {FILE} was not measured"));
    }
    (problems, large)
}

fn measured(value: &Value) -> Measured {
    let number = |name: &str| value[name].as_u64().unwrap_or(u64::MAX >> 8);
    Measured {
        instructions: number("instructions"),
        stack: number("stack"),
        load_microseconds: number("loadMicroseconds"),
    }
}

/// Indexes the costs by the names of program and variant.
fn named(reported: &[Value]) -> Programs {
    let one = |value: &Value| {
        let [program, variant] = ["program", "variant"].map(|name| {
            let text = value[name].as_str();
            text.unwrap_or("?").to_owned()
        });
        (
            format!("{program} {variant}").trim().to_owned(),
            measured(value),
        )
    };
    reported.iter().map(one).collect()
}

/// Returns true for a program without event logging.
fn is_plain(name: &str) -> bool {
    !name.ends_with("-logged")
}

/// Returns a table of each kernel's verifier costs and load times.
pub(super) fn table<'a>(kernels: impl Iterator<Item = (&'a str, &'a [Value])>) -> String {
    let kernels: Vec<(&str, Programs)> = kernels
        .map(|(kernel, reported)| (kernel, named(reported)))
        .filter(|(_, programs)| !programs.is_empty())
        .collect();
    let mut names: Vec<&String> = kernels.iter().flat_map(|(_, it)| it.keys()).collect();
    // Programs with event logging are too many for this table; the file has them.
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
                |it| {
                    format!(
                        "{} / {} / {}",
                        it.instructions, it.stack, it.load_microseconds
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
    fn the_page_of_kernels_says_what_is_written_down() {
        let budget = Budget::read().expect("the file");
        let page = fs::read_to_string(workspace::root().join(PAGE.page)).expect("the page");

        assert_eq!(PAGE.with(&page, &budget.text()).as_deref(), Some(&*page));
    }

    #[test]
    fn growth_over_a_tenth_a_limit_and_what_nobody_wrote_down_are_problems() {
        let mut budget = Budget::parse("{}").expect("empty");
        let problems = |budget: &Budget, report: &Report| {
            let (old, large) = budget.problems("6.1", "6.1.0", report);
            (old.len(), large.len())
        };
        assert_eq!(problems(&budget, &report(1000, 200)), (1, 0));
        budget.take("6.1", "6.1.0", &report(1000, 200));

        assert_eq!(problems(&budget, &report(1100, 220)), (0, 0));
        assert_eq!(problems(&budget, &report(1101, 200)), (1, 0));
        assert_eq!(problems(&budget, &report(1000, 221)), (1, 0));
        assert_eq!(problems(&budget, &Report::default()), (0, 1));
        let other = Report {
            features: json!({ "tcx": true }),
            ..report(1000, 200)
        };
        assert_eq!(problems(&budget, &other), (1, 0));

        budget.take("6.1", "6.1.0", &report(700_001, 482));
        assert_eq!(problems(&budget, &report(700_001, 482)), (0, 2));
    }
}
