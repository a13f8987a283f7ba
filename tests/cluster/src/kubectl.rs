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

/// The time limit of a call, and of a rollout in the cluster.
const CALL: Duration = Duration::from_secs(60);
const ROLLOUT: Duration = Duration::from_secs(120);

/// The program, the place where it runs, and the client config.
#[derive(Clone, Debug)]
pub struct Kubectl {
    host: Place,
    program: String,
    /// The path of the administrator's client config.
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

    /// Runs `kubectl`, which must succeed; returns its output.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.outcome(words, CALL)?;
        let (words, why) = (words.join(" "), output.stderr.trim());
        ensure!(output.exit.is_success(), "`kubectl {words}` failed: {why}");
        Ok(output.stdout)
    }

    /// Runs `kubectl` to its end, with any exit status.
    fn outcome(&self, words: &[&str], within: Duration) -> Result<Output> {
        self.start(words)?.finish(within)
    }

    /// Starts `kubectl` for a call that runs until it is dropped.
    pub fn start(&self, words: &[&str]) -> Result<Process> {
        self.host.command(&self.command(words)).start()
    }

    /// Starts `kubectl` with its output in a file.
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

    /// Waits until an object, which may not exist yet, has a condition.
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

    /// Waits until the rollout of a Deployment or DaemonSet is complete.
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

    /// Returns the command line that runs `kubectl` from a shell.
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
