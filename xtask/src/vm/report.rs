//! Parses a virtual machine's report. Each line is either an event, as a JSON object, or a line that one of
//! the machine's programs printed, after a bar (`| `).

use serde_json::Value;

/// A test that was skipped because the kernel lacks a feature.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Skip {
    pub(crate) test: String,
    pub(crate) feature: String,
}

/// The contents of a report, which may be incomplete.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Seconds from the start of the kernel to the start of the first program.
    pub(crate) booted: Option<f64>,
    /// Modules that the kernel refused to load, each with the error.
    pub(crate) refused_modules: Vec<String>,
    /// Modules that the kernel requested but the virtual machine lacks.
    pub(crate) missing_modules: Vec<String>,
    /// Number of tests that libtest reported as passed, including skipped ones.
    pub(crate) passed: usize,
    pub(crate) failed: Vec<String>,
    pub(crate) skips: Vec<Skip>,
    /// Programs in the plan that failed, each with the reason.
    pub(crate) failed_programs: Vec<String>,
    /// The verifier's costs for the kernel programs, as `culvert-lab verify` reports them.
    pub(crate) verifier: Vec<Value>,
    /// The kernel's features, as `culvert-lab verify` reports them.
    pub(crate) features: Value,
    /// True if all programs ran and none failed.
    pub(crate) is_good: bool,
    /// Duration of each test in seconds; the names of tests in the packet tier have the prefix `packet::`.
    pub(crate) seconds: Vec<(String, f64)>,
    /// Name of the program that is running.
    pub(crate) program: String,
    /// Number of tests that the test programs have announced.
    pub(crate) announced: usize,
    /// Lines that the programs printed.
    pub(crate) lines: Vec<String>,
}

/// Maximum number of a failed test's output lines that are repeated below the table.
const MAX_OUTPUT_LINES: usize = 20;

impl Report {
    /// Parses a report; a malformed line is treated as an output line.
    pub(crate) fn parse(text: &str) -> Self {
        let mut report = Self::default();
        for line in text.lines() {
            if let Some(printed) = line.strip_prefix('|') {
                report.line(printed.strip_prefix(' ').unwrap_or(printed));
            } else if let Ok(event) = serde_json::from_str::<Value>(line) {
                report.event(&event);
            } else if !line.is_empty() {
                report.lines.push(line.to_owned());
            }
        }
        report
    }

    /// Returns how many tests passed. libtest also reports skipped tests as passed.
    pub(crate) fn passed(&self) -> usize {
        self.passed.saturating_sub(self.skips.len())
    }

    /// Returns how many tests have finished, including skipped ones.
    pub(crate) const fn finished(&self) -> usize {
        self.passed + self.failed.len()
    }

    /// Returns how many of the announced tests did not finish.
    pub(crate) const fn unfinished(&self) -> usize {
        self.announced.saturating_sub(self.finished())
    }

    /// Adds the report from another virtual machine with the same kernel.
    pub(crate) fn merge(&mut self, other: Self) {
        self.booted = self.booted.or(other.booted);
        self.passed += other.passed;
        self.seconds.extend(other.seconds);
        self.announced += other.announced;
        self.failed.extend(other.failed);
        self.skips.extend(other.skips);
        self.verifier.extend(other.verifier);
        if !other.features.is_null() {
            self.features = other.features;
        }
        self.missing_modules.extend(other.missing_modules);
        self.lines.extend(other.lines);
        self.is_good |= other.is_good;
    }

    /// Returns a failed test's output, which libtest prints after all tests.
    pub(crate) fn output_of(&self, test: &str) -> &[String] {
        let head = format!("---- {test} stdout ----");
        let Some(start) = self.lines.iter().position(|line| *line == head) else {
            return &[];
        };
        let output = self.lines.get(start + 1..).unwrap_or_default();
        let is_end = |line: &String| line.starts_with("---- ") || line.as_str() == "failures:";
        let end = output.iter().position(is_end).unwrap_or(output.len());
        output.get(..end.min(MAX_OUTPUT_LINES)).unwrap_or_default()
    }

    fn event(&mut self, event: &Value) {
        let texts = |name: &str| -> Vec<String> {
            let values = event[name].as_array().into_iter().flatten();
            values
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        };
        match event["event"].as_str() {
            Some("begin") => event["entry"]
                .as_str()
                .unwrap_or_default()
                .clone_into(&mut self.program),
            Some("booted") => self.booted = event["seconds"].as_f64(),
            Some("modules") => self.refused_modules = texts("refused"),
            Some("done") if event["code"] != 0 => {
                let reason = match event["code"].as_i64() {
                    Some(code) => format!("exited with code {code}"),
                    None => "was killed by a signal or after its time limit".to_owned(),
                };
                let failure = format!("{} {reason}", event["entry"]);
                self.failed_programs.push(failure);
            }
            Some("broken") => self.failed_programs.push(event["error"].to_string()),
            Some("end") => {
                self.missing_modules = texts("wanted");
                self.skips = texts("skips")
                    .iter()
                    .filter_map(|line| parse_skip(line))
                    .collect();
                self.is_good = event["failed"] == 0;
            }
            _ => {}
        }
    }

    /// Handles a line that a program printed.
    fn line(&mut self, line: &str) {
        if let Some(count) = parse_announcement(line) {
            self.announced += count;
        } else if let Some(result) = parse_result(line) {
            if let (test, Some(seconds)) = (result.0, parse_seconds(line)) {
                let is_packet = self.program == "packet";
                let module = if is_packet { "packet::" } else { "" };
                self.seconds.push((format!("{module}{test}"), seconds));
            }
            match result {
                (_, true) => self.passed += 1,
                (test, false) => self.failed.push(test.to_owned()),
            }
        } else if let Ok(Value::Object(object)) = serde_json::from_str(line)
            && let Some(Value::Array(programs)) = object.get("verifier")
        {
            self.verifier.extend(programs.iter().cloned());
            self.features = object.get("features").cloned().unwrap_or_default();
            return;
        }
        self.lines.push(line.to_owned());
    }
}

/// Parses a line in a skip file: the test and the missing kernel feature.
pub(crate) fn parse_skip(line: &str) -> Option<Skip> {
    let (test, feature) = line.trim().split_once(' ')?;
    Some(Skip {
        test: test.to_owned(),
        feature: feature.to_owned(),
    })
}

/// Returns how many tests libtest announces in a line such as `running 12 tests`.
fn parse_announcement(line: &str) -> Option<usize> {
    let count = line.strip_prefix("running ")?.strip_suffix(" tests");
    let count = count.or_else(|| line.strip_prefix("running ")?.strip_suffix(" test"))?;
    count.parse().ok()
}

/// Returns the duration in a test's result line, such as `test a::b ... ok <1.250s>`.
fn parse_seconds(line: &str) -> Option<f64> {
    let (_, seconds) = line.strip_suffix("s>")?.rsplit_once('<')?;
    seconds.parse().ok()
}

/// Returns a test's name, and true if it passed, from its result line.
fn parse_result(line: &str) -> Option<(&str, bool)> {
    let (test, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    match result.split(' ').next()? {
        "ok" => Some((test, true)),
        "FAILED" => Some((test, false)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"event":"booted","release":"6.1.0","seconds":1.5}
{"event":"modules","loaded":3,"refused":["x.ko: ENOENT"],"seconds":0.2}
{"event":"begin","entry":"netns"}
| running 4 tests
| test hooks::one ... ok <1.250s>
| test natives::sctp ... ok
| test hooks::two ... FAILED
|
| ---- hooks::two stdout ----
| Error: refused
| failures:
| {"verifier":[{"program":"connect4"}]}
{"event":"done","entry":"netns","code":101,"seconds":3.5}
{"event":"end","failed":1,"skips":["natives::sctp sctp"],"wanted":["tls"]}
"#;

    #[test]
    fn tests_skips_and_failures_are_read() {
        let report = Report::parse(TEXT);

        assert_eq!((report.passed(), report.failed.len()), (1, 1));
        assert_eq!((report.finished(), report.unfinished()), (3, 1));
        assert_eq!(report.failed, ["hooks::two"]);
        assert_eq!(report.seconds, [("hooks::one".to_owned(), 1.25)]);
        assert_eq!(report.output_of("hooks::two"), ["Error: refused"]);
        assert!(report.output_of("hooks::one").is_empty());
        assert_eq!(report.failed_programs, ["\"netns\" exited with code 101"]);
        assert_eq!(report.skips[0].feature, "sctp");
        assert_eq!(report.refused_modules, ["x.ko: ENOENT"]);
        assert_eq!(report.missing_modules, ["tls"]);
        assert_eq!(report.verifier.len(), 1);
        assert!(!report.is_good);
    }

    #[test]
    fn an_incomplete_report_is_not_good() {
        let good = r#"{"event":"end","failed":0}"#;
        assert!(Report::parse(good).is_good);

        let incomplete = Report::parse("| test hooks::one ... ok\n{\"event\":\"e");

        assert!(!incomplete.is_good);
        assert_eq!(incomplete.passed(), 1);
        let last = incomplete.lines.last().expect("a line");
        assert_eq!(last, "{\"event\":\"e");
    }
}
