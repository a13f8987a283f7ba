//! The plan for a virtual machine: a list of programs to run one after another.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::json;
use tunnel_tests::clock::Instant;

use crate::io_ports::IoPorts;

const PLAN: &str = "/etc/plan.json";

/// The programs to run in this virtual machine, as written by `cargo xtask vm`.
#[derive(Debug, Deserialize)]
pub(crate) struct Plan {
    /// Environment variables that are set for every program.
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) entries: Vec<Entry>,
}

/// A program to run in this virtual machine.
#[derive(Debug, Deserialize)]
pub(crate) struct Entry {
    name: String,
    /// The program and its arguments.
    command: Vec<String>,
    /// The program's time limit in seconds.
    seconds: u64,
    /// True if the program uses the console interactively.
    #[serde(default)]
    interactive: bool,
}

/// Reads the plan from a file in the initramfs.
pub(crate) fn read() -> Result<Plan> {
    let text = fs::read(PLAN).with_context(|| format!("cannot read {PLAN}"))?;
    serde_json::from_slice(&text).with_context(|| format!("{PLAN} is not a plan in JSON"))
}

/// Runs a program and reports its output. Returns true if the program succeeds.
pub(crate) fn run(
    entry: &Entry,
    environment: &BTreeMap<String, String>,
    ports: &IoPorts,
) -> Result<bool> {
    let start = Instant::now();
    ports.event(&json!({ "event": "begin", "entry": entry.name }));
    let (program, arguments) = entry
        .command
        .split_first()
        .with_context(|| format!("entry {} of the plan has an empty command", entry.name))?;
    let mut command = Command::new(program);
    command.args(arguments).envs(environment);
    if entry.interactive {
        return Ok(command.status()?.success());
    }
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let code = wait_and_report(child, Duration::from_secs(entry.seconds), ports)?;
    let is_good = code.is_some_and(|code| code == 0);
    ports.event(&json!({
        "event": "done",
        "entry": entry.name,
        "code": code,
        "seconds": start.elapsed().as_secs_f64(),
    }));
    Ok(is_good)
}

/// Reports a program's output until the program exits, but kills the program at the time limit. Returns the
/// exit code, or `None` if the program was killed.
fn wait_and_report(mut child: Child, limit: Duration, ports: &IoPorts) -> Result<Option<i32>> {
    let (sender, lines) = mpsc::channel();
    if let Some(out) = child.stdout.take() {
        forward_lines(out, sender.clone());
    }
    if let Some(errors) = child.stderr.take() {
        forward_lines(errors, sender);
    }
    let deadline = Instant::now() + limit;
    let mut is_timed_out = false;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => ports.line(&line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                ports.line(&format!("killed after {} s", limit.as_secs()));
                child.kill()?;
                is_timed_out = true;
                break;
            }
        }
    }
    let code = child.wait()?.code();
    Ok(code.filter(|_| !is_timed_out))
}

/// Starts a thread that sends each line of a program's output to a channel.
fn forward_lines(from: impl Read + Send + 'static, to: mpsc::Sender<String>) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if to.send(text).is_err() {
                break;
            }
            line.clear();
        }
    });
}
