//! Kubernetes' own specs, run by ginkgo on the cloud node, since several of them connect to nodes
//! directly.

use std::{fmt, fs, time::Duration};

use anyhow::{Context as _, Result, ensure};

use super::Cluster;

/// The time that ginkgo may take beyond its own limit.
const SLACK: Duration = Duration::from_secs(60);

/// The specs to run, and their limits.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The selected specs: regular expressions of their names.
    pub focus: Vec<String>,
    /// The excluded specs: regular expressions of their names.
    pub skip: Vec<String>,
    /// The number of concurrent specs; most of their time is waiting.
    pub side_by_side: u32,
    /// The time limit of the complete run.
    pub limit: Duration,
}

/// The result of a spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The name of the spec, without its labels.
    pub name: String,
    /// The verdict on the spec.
    pub verdict: Verdict,
    /// The duration of the spec.
    pub took: Duration,
    /// The message of a failed spec.
    pub message: String,
    /// The log of the spec.
    pub log: String,
}

/// The verdict on a spec.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The spec passed.
    Passed,
    /// The spec failed.
    Failed,
    /// The spec failed for a known reason.
    NotYet,
    /// The spec can't run here.
    Skipped,
}

impl Case {
    /// Creates the result of a spec without a log.
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

impl fmt::Display for Case {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            Verdict::Passed => "ok",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
            Verdict::NotYet => "not yet",
        };
        let (seconds, name) = (self.took.as_secs_f32(), &self.name);
        write!(out, "{word:<8} {seconds:>7.1}  {name}")
    }
}

/// Runs specs; returns their results.
pub fn run(cluster: &Cluster, choice: &Choice) -> Result<Vec<Case>> {
    let (kit, logs) = (&cluster.site.kit, &cluster.site.logs);
    let mut command = kit.command(&[&kit.program("ginkgo"), "--no-color"]);
    command.extend([
        format!("--procs={}", choice.side_by_side),
        format!("--timeout={}s", choice.limit.as_secs()),
        format!("--output-dir={}", logs.folder().display()),
        "--junit-report=ginkgo.xml".to_owned(),
    ]);
    command.extend(choice.focus.iter().map(|it| format!("--focus={it}")));
    command.extend(choice.skip.iter().map(|it| format!("--skip={it}")));
    command.extend([
        kit.program("e2e.test"),
        "--".to_owned(),
        format!("--kubeconfig={}", cluster.kubectl.config),
        "--provider=skeleton".to_owned(),
        format!("--kubectl-path={}", kit.program("kubectl")),
        format!("--num-nodes={}", cluster.nodes.len()),
        "--disable-log-dump=true".to_owned(),
    ]);
    let host = &cluster.nodes.first().context("no node")?.host;
    let ended = host
        .command(&command)
        .log(logs.create("ginkgo")?)
        .start()?
        .wait(choice.limit + SLACK)?;
    let path = logs.path("ginkgo.xml");
    let text = fs::read(&path)
        .with_context(|| format!("ginkgo ended with {ended:?} and left no {}", path.display()))?;
    let cases = read(&String::from_utf8_lossy(&text))?;
    let is_told = cases.iter().any(|case| case.verdict == Verdict::Failed);
    ensure!(
        ended.is_success() || is_told,
        "ginkgo ended with {ended:?}, and no spec failed"
    );
    Ok(cases)
}

/// Parses a JUnit report. It also lists the specs outside of the focus, as skipped with a duration of 0.
fn read(report: &str) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for part in report.split("<testcase ").skip(1) {
        let (head, rest) = part.split_once('>').context("a case without an end")?;
        let value = |name: &str| attribute(head, name).context("a case without an attribute");
        let seconds: f64 = value("time")?.parse()?;
        let took = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let verdict = match value("status")?.as_str() {
            "passed" => Verdict::Passed,
            "skipped" | "pending" if took.is_zero() => continue,
            "skipped" | "pending" => Verdict::Skipped,
            _ => Verdict::Failed,
        };
        let full = value("name")?;
        let name = full.strip_prefix("[It] ");
        // Setup and teardown of all specs count only if they fail.
        if name.is_some() || verdict == Verdict::Failed {
            cases.push(case(name.unwrap_or(&full), verdict, took, rest));
        }
    }
    Ok(cases)
}

fn case(name: &str, verdict: Verdict, took: Duration, rest: &str) -> Case {
    let failure = rest
        .split_once("<failure ")
        .filter(|_| verdict == Verdict::Failed);
    let message = failure.and_then(|(_, rest)| {
        let (head, _) = rest.split_once('>')?;
        attribute(head, "message")
    });
    Case {
        log: unescaped(rest),
        ..Case::new(plain(name), verdict, took, message.unwrap_or_default())
    }
}

/// Returns the value of an attribute, with its entities for `<`, `>`, `&` and quotes unescaped.
fn attribute(head: &str, name: &str) -> Option<String> {
    let (_, rest) = head.split_once(&format!("{name}=\""))?;
    let (value, _) = rest.split_once('"')?;
    Some(unescaped(value))
}

fn unescaped(text: &str) -> String {
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

/// Removes the labels after a name, each in brackets.
fn plain(name: &str) -> &str {
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
    fn a_report_tells_what_became_of_the_specs_that_were_run() {
        let cases = read(REPORT).unwrap();

        let told: Vec<_> = cases
            .iter()
            .map(|case| (case.name.as_str(), case.verdict, case.message.as_str()))
            .collect();
        assert_eq!(
            told,
            [
                ("[sig-network] Services should <serve>", Verdict::Passed, ""),
                ("[sig-network] wants zones", Verdict::Skipped, ""),
                ("[sig-network] DNS", Verdict::Failed, "no \"answer\""),
            ]
        );
        assert_eq!(cases[0].took, Duration::from_millis(7250));
    }
}
