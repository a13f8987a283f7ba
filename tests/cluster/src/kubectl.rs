//! Runs `kubectl` on the cloud node as the administrator.

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
use serde_json::Value;
use tunnel_tests::{
    sandbox::{Output, Process, Sandbox},
    wait,
};

use super::components::Components;

/// The time limit for a `kubectl` command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for a rollout.
const ROLLOUT_TIMEOUT: Duration = Duration::from_secs(120);

/// The `kubectl` program, with the host it runs on and its kubeconfig.
#[derive(Clone, Debug)]
pub struct Kubectl {
    host: Sandbox,
    program: String,
    /// The path of the administrator's kubeconfig.
    pub config: String,
    /// The directory for the files to apply and for `kubectl`'s cache.
    directory: PathBuf,
    /// The number of the next file to apply.
    next_file: Arc<AtomicU32>,
}

impl Kubectl {
    pub(super) fn new(
        host: &Sandbox,
        components: &Components,
        config: String,
        directory: PathBuf,
    ) -> Result<Self> {
        fs::create_dir_all(&directory)?;
        Ok(Self {
            host: host.clone(),
            program: components.program("kubectl"),
            config,
            directory,
            next_file: Arc::default(),
        })
    }

    /// Runs `kubectl` and returns its output. Returns an error if `kubectl` fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run_unchecked(arguments, COMMAND_TIMEOUT)?;
        let (arguments, stderr) = (arguments.join(" "), output.stderr.trim());
        ensure!(
            output.exit.is_success(),
            "`kubectl {arguments}` failed: {stderr}"
        );
        Ok(output.stdout)
    }

    /// Runs `kubectl get` and returns the object, or the list of objects.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let arguments = [&["get", "-o", "json"], arguments].concat();
        Ok(serde_json::from_str(&self.run(&arguments)?)?)
    }

    /// Runs `kubectl` and returns its output, whatever its exit status.
    fn run_unchecked(&self, arguments: &[&str], limit: Duration) -> Result<Output> {
        self.start(arguments)?.finish(limit)
    }

    /// Starts `kubectl`, which is killed when the returned process is dropped.
    pub fn start(&self, arguments: &[&str]) -> Result<Process> {
        self.host.command(&self.command(arguments)).start()
    }

    /// Starts `kubectl` with its output redirected to a file.
    pub fn start_with_output(&self, arguments: &[&str], file: File) -> Result<Process> {
        let command = self.command(arguments);
        self.host.command(&command).log(file).start()
    }

    /// Writes objects to a file, and returns its path.
    fn write(&self, objects: &str) -> Result<String> {
        let number = self.next_file.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(format!("{number}.yaml"));
        fs::write(&path, objects)?;
        Ok(path.display().to_string())
    }

    fn command(&self, arguments: &[&str]) -> Vec<String> {
        let mut command = vec![
            self.program.clone(),
            format!("--kubeconfig={}", self.config),
            format!("--cache-dir={}", self.directory.join("cache").display()),
        ];
        command.extend(arguments.iter().map(|&argument| argument.to_owned()));
        command
    }

    /// Applies objects given as YAML.
    pub fn apply(&self, objects: &str) -> Result<()> {
        let path = self.write(objects)?;
        self.run(&["apply", "-f", &path])
            .map(drop)
            .with_context(|| format!("cannot apply\n{objects}"))
    }

    /// Creates an object, given as YAML, with further options, such as the user to impersonate.
    pub fn create_as(&self, object: &str, options: &[String]) -> Result<()> {
        let path = self.write(object)?;
        let options = options.iter().map(String::as_str);
        let arguments: Vec<_> = ["create", "-f", &path].into_iter().chain(options).collect();
        self.run(&arguments).map(drop)
    }

    /// Waits until an object's condition is true. The object need not exist yet.
    pub fn wait_for(
        &self,
        kind: &str,
        name: &str,
        condition: &str,
        within: Duration,
    ) -> Result<()> {
        let path = format!("jsonpath={{.status.conditions[?(@.type==\"{condition}\")].status}}");
        let arguments = ["get", kind, name, "-o", &path];
        wait::until(within, || {
            self.run(&arguments).is_ok_and(|status| status == "True")
        })
    }

    /// Waits until the rollout of a Deployment or DaemonSet is complete.
    pub fn wait_for_rollout(&self, namespace: &str, name: &str) -> Result<()> {
        let limit = format!("--timeout={}s", ROLLOUT_TIMEOUT.as_secs());
        let arguments = ["-n", namespace, "rollout", "status", name, &limit];
        let output = self.run_unchecked(&arguments, ROLLOUT_TIMEOUT + COMMAND_TIMEOUT)?;
        if output.exit.is_success() {
            return Ok(());
        }
        let pods = self.run(&["-n", namespace, "get", "pods", "-o", "wide"])?;
        let stderr = output.stderr.trim();
        bail!("the rollout of {name} in {namespace} did not complete: {stderr}\n{pods}")
    }

    /// Returns a command that a user can type to run `kubectl`.
    #[must_use]
    pub fn shell_command(&self) -> String {
        format!(
            "nsenter -t {} -n {} --kubeconfig={}",
            self.host.pid(),
            self.program,
            self.config
        )
    }
}
