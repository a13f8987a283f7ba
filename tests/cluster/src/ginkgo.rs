//! Runs Kubernetes' e2e tests with ginkgo. ginkgo runs on the cloud node, since some tests connect to nodes
//! directly.

use std::{fmt, fs, time::Duration};

use anyhow::{Context as _, Result, ensure};

use super::Cluster;

/// The time that ginkgo may take to exit after its own time limit.
const SLACK: Duration = Duration::from_secs(60);

/// The tests to run, how many of them to run concurrently, and the time limit.
#[derive(Clone, Debug)]
pub struct SpecSelection {
    /// Regular expressions that match the names of the tests to run.
    pub focus: Vec<String>,
    /// Regular expressions that match the names of the tests to skip.
    pub skip: Vec<String>,
    /// The number of tests to run concurrently. Tests spend most of their time waiting.
    pub concurrent: u32,
    /// The time limit for the whole run.
    pub limit: Duration,
}

/// The result of a test.
#[derive(Clone, Debug, PartialEq)]
pub struct SpecResult {
    /// The test's name, without its labels.
    pub name: String,
    pub verdict: Verdict,
    pub took: Duration,
    /// The error message; empty if the test did not fail.
    pub message: String,
    /// The test's output.
    pub log: String,
}

/// The outcome of a test.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    Passed,
    Failed,
    /// The test cannot run on this cluster.
    Skipped,
}

impl SpecResult {
    /// Creates a result without any output.
    #[must_use]
    pub fn new(name: &str, verdict: Verdict, took: Duration, message: String) -> Self {
        Self {
            name: name.to_owned(),
            verdict,
            took,
            message,
            log: String::new(),
        }
    }
}

impl fmt::Display for SpecResult {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            Verdict::Passed => "ok",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
        };
        let (seconds, name) = (self.took.as_secs_f32(), &self.name);
        write!(out, "{word:<8} {seconds:>7.1}  {name}")
    }
}

/// Runs the selected tests, and returns their results.
pub fn run(cluster: &Cluster, selection: &SpecSelection) -> Result<Vec<SpecResult>> {
    let (components, logs) = (&cluster.shared.components, &cluster.shared.logs);
    let mut command = components.command(&[&components.program("ginkgo"), "--no-color"]);
    command.extend([
        format!("--procs={}", selection.concurrent),
        format!("--timeout={}s", selection.limit.as_secs()),
        format!("--output-dir={}", logs.directory().display()),
        "--junit-report=ginkgo.xml".to_owned(),
    ]);
    command.extend(selection.focus.iter().map(|it| format!("--focus={it}")));
    command.extend(selection.skip.iter().map(|it| format!("--skip={it}")));
    command.extend([
        components.program("e2e.test"),
        "--".to_owned(),
        format!("--kubeconfig={}", cluster.kubectl.config),
        "--provider=skeleton".to_owned(),
        format!("--kubectl-path={}", components.program("kubectl")),
        format!("--num-nodes={}", cluster.nodes.len()),
        "--disable-log-dump=true".to_owned(),
    ]);
    let host = &cluster
        .nodes
        .first()
        .context("the cluster has no node")?
        .host;
    let exit = host
        .command(&command)
        .log(logs.create("ginkgo")?)
        .start()?
        .wait(selection.limit + SLACK)?;
    let path = logs.path("ginkgo.xml");
    let report = fs::read(&path).with_context(|| {
        format!(
            "ginkgo exited with {exit:?} and wrote no report {}",
            path.display()
        )
    })?;
    let results = parse_report(&String::from_utf8_lossy(&report))?;
    let has_failure = results
        .iter()
        .any(|result| result.verdict == Verdict::Failed);
    ensure!(
        exit.is_success() || has_failure,
        "ginkgo exited with {exit:?}, but its report has no failed spec"
    );
    Ok(results)
}

/// Parses a JUnit report. Ignores tests that were not selected, which ginkgo reports as skipped with a
/// duration of 0.
fn parse_report(report: &str) -> Result<Vec<SpecResult>> {
    let mut results = Vec::new();
    for part in report.split("<testcase ").skip(1) {
        let (head, rest) = part
            .split_once('>')
            .context("the report has an incomplete <testcase>")?;
        let value = |name: &str| {
            attribute(head, name)
                .with_context(|| format!("the report has a <testcase> without {name}: {head}"))
        };
        let seconds: f64 = value("time")?.parse()?;
        let took = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let verdict = match value("status")?.as_str() {
            "passed" => Verdict::Passed,
            "skipped" | "pending" if took.is_zero() => continue,
            "skipped" | "pending" => Verdict::Skipped,
            _ => Verdict::Failed,
        };
        let full_name = value("name")?;
        let name = full_name.strip_prefix("[It] ");
        // The other entries are the suite's setup and teardown, which are included only if they failed.
        if name.is_some() || verdict == Verdict::Failed {
            let name = name.unwrap_or(&full_name);
            results.push(parse_result(name, verdict, took, rest));
        }
    }
    Ok(results)
}

/// Returns a test's result. `rest` is the part of the report that follows the opening tag of the test's
/// entry.
fn parse_result(name: &str, verdict: Verdict, took: Duration, rest: &str) -> SpecResult {
    let failure = rest
        .split_once("<failure ")
        .filter(|_| verdict == Verdict::Failed);
    let message = failure.and_then(|(_, rest)| {
        let (head, _) = rest.split_once('>')?;
        attribute(head, "message")
    });
    SpecResult {
        log: unescape(rest),
        ..SpecResult::new(
            without_labels(name),
            verdict,
            took,
            message.unwrap_or_default(),
        )
    }
}

/// Returns the unescaped value of an attribute in a tag.
fn attribute(head: &str, name: &str) -> Option<String> {
    let (_, rest) = head.split_once(&format!("{name}=\""))?;
    let (value, _) = rest.split_once('"')?;
    Some(unescape(value))
}

/// Replaces the XML entities that ginkgo writes with the characters that they stand for.
fn unescape(text: &str) -> String {
    let mut plain = text.to_owned();
    for (entity, letter) in [
        ("&#34;", "\""),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&apos;", "'"),
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&#xA;", "\n"),
        ("&#x9;", "\t"),
        ("&amp;", "&"),
    ] {
        plain = plain.replace(entity, letter);
    }
    plain
}

/// Removes the bracketed labels from the end of a name.
fn without_labels(name: &str) -> &str {
    let mut rest = name.trim();
    while let Some((before, _)) = rest.strip_suffix(']').and_then(|it| it.rsplit_once(" [")) {
        rest = before.trim_end();
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"<testsuites><testsuite name="e2e">
<testcase name="[SynchronizedBeforeSuite]" classname="e2e" status="passed" time="1.5"></testcase>
<testcase name="[It] [sig-network] Services should &lt;serve&gt; [Conformance] [sig-network, Conformance]" classname="e2e" status="passed" time="7.25"><system-err>a &gt; b</system-err></testcase>
<testcase name="[It] [sig-node] left out" classname="e2e" status="skipped" time="0"><skipped/></testcase>
<testcase name="[It] [sig-network] wants zones" classname="e2e" status="skipped" time="0.4"></testcase>
<testcase name="[It] [sig-network] DNS" classname="e2e" status="timedout" time="60"><failure message="no &#34;answer&#34;" type="timedout">x</failure></testcase>
</testsuite></testsuites>"#;

    #[test]
    fn the_results_of_the_specs_that_ran_are_read_from_the_report() {
        let results = parse_report(REPORT).unwrap();

        let fields: Vec<_> = results
            .iter()
            .map(|result| {
                let (name, message) = (result.name.as_str(), result.message.as_str());
                (name, result.verdict, message)
            })
            .collect();
        assert_eq!(
            fields,
            [
                ("[sig-network] Services should <serve>", Verdict::Passed, ""),
                ("[sig-network] wants zones", Verdict::Skipped, ""),
                ("[sig-network] DNS", Verdict::Failed, "no \"answer\""),
            ]
        );
        assert_eq!(results[0].took, Duration::from_millis(7250));
    }
}
