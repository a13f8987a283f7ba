//! The report of a machine and its tests: events, one JSON object per line, and between them the output
//! of programs, each line prefixed by a bar.

use serde_json::Value;

/// A test that did not run, since the kernel lacks something that it needs.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) struct Skip {
    pub(crate) test: String,
    pub(crate) feature: String,
}

/// The data of a machine's report, which may be incomplete.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Seconds until its first program ran.
    pub(crate) booted: Option<f64>,
    /// Modules that its kernel refused.
    pub(crate) refused: Vec<String>,
    /// Modules that its kernel requested and did not get.
    pub(crate) wanted: Vec<String>,
    pub(crate) passed: usize,
    pub(crate) failed: Vec<String>,
    pub(crate) skips: Vec<Skip>,
    /// Programs of the plan that failed, with their exit codes.
    pub(crate) broken: Vec<String>,
    /// The measurements of `culvert-lab verify`.
    pub(crate) verifier: Vec<Value>,
    /// The kernel features that it found.
    pub(crate) features: Value,
    /// True if the machine reached its end without a failure.
    pub(crate) is_good: bool,
    /// The seconds of each test, those of the packet tier as one module.
    pub(crate) seconds: Vec<(String, f64)>,
    /// The running program.
    pub(crate) entry: String,
    /// The number of tests that the test programs announced.
    pub(crate) announced: usize,
    /// The output of programs.
    pub(crate) lines: Vec<String>,
}

/// The number of a failed test's output lines that are repeated under the table.
const MOST_SAID: usize = 20;

impl Report {
    /// Reads a report; malformed lines are kept as output of programs.
    pub(crate) fn read(text: &str) -> Self {
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

    /// Returns the number of passed tests. A skipped test returned early, and is reported as passed.
    pub(crate) fn passed(&self) -> usize {
        self.passed.saturating_sub(self.skips.len())
    }

    /// Returns the number of finished tests, including skipped ones.
    pub(crate) const fn ran(&self) -> usize {
        self.passed + self.failed.len()
    }

    /// Returns the number of tests without a result.
    pub(crate) const fn lost(&self) -> usize {
        self.announced.saturating_sub(self.ran())
    }

    /// Adds the report of another machine with the same kernel.
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
        self.wanted.extend(other.wanted);
        self.lines.extend(other.lines);
        self.is_good |= other.is_good;
    }

    /// Returns the output of a failed test, as libtest repeats it at the end.
    pub(crate) fn said(&self, test: &str) -> &[String] {
        let head = format!("---- {test} stdout ----");
        let Some(start) = self.lines.iter().position(|line| *line == head) else {
            return &[];
        };
        let said = self.lines.get(start + 1..).unwrap_or_default();
        let is_end = |line: &String| line.starts_with("---- ") || line.as_str() == "failures:";
        let end = said.iter().position(is_end).unwrap_or(said.len());
        said.get(..end.min(MOST_SAID)).unwrap_or_default()
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
                .clone_into(&mut self.entry),
            Some("booted") => self.booted = event["seconds"].as_f64(),
            Some("modules") => self.refused = texts("refused"),
            Some("done") if event["code"] != 0 => {
                let how = match event["code"].as_i64() {
                    Some(code) => format!("ended with {code}"),
                    None => "was ended by a signal or for taking too long".to_owned(),
                };
                self.broken.push(format!("{} {how}", event["entry"]));
            }
            Some("broken") => self.broken.push(event["error"].to_string()),
            Some("end") => {
                self.wanted = texts("wanted");
                self.skips = texts("skips")
                    .iter()
                    .filter_map(|line| skip(line))
                    .collect();
                self.is_good = event["failed"] == 0;
            }
            _ => {}
        }
    }

    /// Reads an output line of a program.
    fn line(&mut self, line: &str) {
        if let Some(count) = announced(line) {
            self.announced += count;
        } else if let Some(outcome) = outcome(line) {
            if let (test, Some(seconds)) = (outcome.0, seconds(line)) {
                let is_packet = self.entry == "packet";
                let module = if is_packet { "packet::" } else { "" };
                self.seconds.push((format!("{module}{test}"), seconds));
            }
            match outcome {
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

/// Reads a line of the file of skips: the test and the missing kernel feature.
pub(crate) fn skip(line: &str) -> Option<Skip> {
    let (test, feature) = line.trim().split_once(' ')?;
    Some(Skip {
        test: test.to_owned(),
        feature: feature.to_owned(),
    })
}

/// Returns the number of tests in libtest's announcement.
fn announced(line: &str) -> Option<usize> {
    let count = line.strip_prefix("running ")?.strip_suffix(" tests");
    let count = count.or_else(|| line.strip_prefix("running ")?.strip_suffix(" test"))?;
    count.parse().ok()
}

/// Returns the seconds in libtest's result line of a test.
fn seconds(line: &str) -> Option<f64> {
    let (_, seconds) = line.strip_suffix("s>")?.rsplit_once('<')?;
    seconds.parse().ok()
}

/// Returns the name of a test and true if it passed, from libtest's result line.
fn outcome(line: &str) -> Option<(&str, bool)> {
    let (test, how) = line.strip_prefix("test ")?.split_once(" ... ")?;
    match how.split(' ').next()? {
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
    fn tests_skips_and_what_went_wrong_are_read() {
        let report = Report::read(TEXT);

        assert_eq!((report.passed(), report.failed.len()), (1, 1));
        assert_eq!((report.ran(), report.lost()), (3, 1));
        assert_eq!(report.failed, ["hooks::two"]);
        assert_eq!(report.seconds, [("hooks::one".to_owned(), 1.25)]);
        assert_eq!(report.said("hooks::two"), ["Error: refused"]);
        assert!(report.said("hooks::one").is_empty());
        assert_eq!(report.broken, ["\"netns\" ended with 101"]);
        assert_eq!(report.skips[0].feature, "sctp");
        assert_eq!(report.refused, ["x.ko: ENOENT"]);
        assert_eq!(report.wanted, ["tls"]);
        assert_eq!(report.verifier.len(), 1);
        assert!(!report.is_good);
    }

    #[test]
    fn a_report_that_breaks_off_is_not_good() {
        let good = r#"{"event":"end","failed":0}"#;
        assert!(Report::read(good).is_good);

        let off = Report::read("| test hooks::one ... ok\n{\"event\":\"e");

        assert!(!off.is_good);
        assert_eq!(off.passed(), 1);
        assert_eq!(off.lines.last().expect("a line"), "{\"event\":\"e");
    }
}
