//! `kubectl` on the cloud node, as the cluster's administrator.

use std::{
    fs::{self, File},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use tunnel_tests::{
    place::{Output, Place, Process},
    wait,
};

use super::kit::Kit;

/// How long a call may take, and something in the cluster.
const CALL: Duration = Duration::from_secs(60);
const ROLLOUT: Duration = Duration::from_secs(120);

/// A program, a place to run it in, and whom it acts for.
#[derive(Clone, Debug)]
pub struct Kubectl {
    host: Place,
    program: String,
    /// The client config of the administrator.
    pub config: String,
    folder: PathBuf,
    written: Arc<AtomicU32>,
}

impl Kubectl {
    pub(super) fn new(host: &Place, kit: &Kit, config: String, folder: PathBuf) -> Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self {
            host: host.clone(),
            program: kit.program("kubectl"),
            config,
            folder,
            written: Arc::default(),
        })
    }

    /// Runs it, which must succeed; what it printed.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.outcome(words, CALL)?;
        let (words, why) = (words.join(" "), output.stderr.trim());
        ensure!(output.exit.is_success(), "`kubectl {words}` failed: {why}");
        Ok(output.stdout)
    }

    /// Runs it to its end, whatever that is.
    fn outcome(&self, words: &[&str], within: Duration) -> Result<Output> {
        self.start(words)?.finish(within)
    }

    /// Starts it, for what runs until it is dropped.
    pub fn start(&self, words: &[&str]) -> Result<Process> {
        self.host.command(&self.command(words)).start()
    }

    /// Starts it, and has it write into a file.
    pub fn start_into(&self, words: &[&str], file: File) -> Result<Process> {
        self.host.command(&self.command(words)).log(file).start()
    }

    fn command(&self, words: &[&str]) -> Vec<String> {
        let mut command = vec![
            self.program.clone(),
            format!("--kubeconfig={}", self.config),
            format!("--cache-dir={}", self.folder.join("cache").display()),
        ];
        command.extend(words.iter().map(|&word| word.to_owned()));
        command
    }

    /// Applies objects in YAML.
    pub fn apply(&self, objects: &str) -> Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let path = self.folder.join(format!("{number}.yaml"));
        fs::write(&path, objects)?;
        let path = path.display().to_string();
        self.run(&["apply", "-f", &path])
            .map(drop)
            .with_context(|| format!("cannot apply\n{objects}"))
    }

    /// Waits until an object, which may not be there yet, has a condition.
    pub fn wait_for(
        &self,
        kind: &str,
        name: &str,
        condition: &str,
        within: Duration,
    ) -> Result<()> {
        let path = format!("jsonpath={{.status.conditions[?(@.type==\"{condition}\")].status}}");
        let words = ["get", kind, name, "-o", &path];
        wait::until(within, || self.run(&words).is_ok_and(|said| said == "True"))
    }

    /// Waits until a Deployment has the pods it wants.
    pub fn rolled_out(&self, namespace: &str, name: &str) -> Result<()> {
        let limit = format!("--timeout={}s", ROLLOUT.as_secs());
        let words = ["-n", namespace, "rollout", "status", name, &limit];
        let output = self.outcome(&words, ROLLOUT + CALL)?;
        if output.exit.is_success() {
            return Ok(());
        }
        let pods = self.run(&["-n", namespace, "get", "pods", "-o", "wide"])?;
        let why = output.stderr.trim();
        bail!("{name} in {namespace} isn't there: {why}\n{pods}")
    }

    /// How to call it from a shell.
    #[must_use]
    pub fn way_in(&self) -> String {
        format!(
            "nsenter -t {} -n {} --kubeconfig={}",
            self.host.pid(),
            self.program,
            self.config
        )
    }
}
