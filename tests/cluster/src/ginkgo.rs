//! Kubernetes' own specs: run by ginkgo on the cloud node, as several of them talk to nodes directly.

use std::{fmt, fs, time::Duration};

use anyhow::{Context as _, Result, ensure};

use super::Cluster;

/// How long ginkgo may take after its own limit.
const SLACK: Duration = Duration::from_secs(60);

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Specs whose names match one of some regular expressions.
    pub focus: Vec<String>,
    /// But for those whose names match one of these.
    pub skip: Vec<String>,
    /// How many run at a time: they wait for most of their time.
    pub side_by_side: u32,
    /// How long all of them may take together.
    pub limit: Duration,
}

/// What became of a spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Its name, without what it is labelled with.
    pub name: String,
    /// How it ended.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
    /// What it said, if it failed.
    pub message: String,
    /// Everything it told on the way.
    pub log: String,
}

/// How a spec ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// It holds.
    Passed,
    /// It doesn't.
    Failed,
    /// It doesn't, as is known, and why.
    NotYet,
    /// It can't be asked here.
    Skipped,
}

impl Case {
    /// What became of a spec that left no log.
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

/// Runs specs.
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

/// The specs in a report in JUnit's format. Specs that the focus left out are in it too, as skipped
/// in no time.
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
        // What runs before and after all specs counts when it fails.
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

/// An attribute's value: in a report `<`, `>`, `&` and quotes in it are written as entities.
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

/// Without the labels that stand behind a name, each in brackets.
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
