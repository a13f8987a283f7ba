//! Runs a virtual machine in QEMU.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{accel::Accel, kernel_download::Kernel, qemu::Qemu, report::Report, test_plan};
use crate::progress::Clock;

/// QEMU's exit status if all tests passed: the guest writes 0x10, and QEMU returns twice that plus one.
const PASSED_STATUS: i32 = 33;
/// A virtual machine's memory, in MiB.
const MEMORY: &str = "1024";
/// Maximum run time of a virtual machine; longer than that of a single program.
pub(super) const MAX_RUN_TIME: Duration = Duration::from_secs(test_plan::PROGRAM_SECONDS + 300);
/// Maximum time without output; longer than a test's timeout.
const MAX_SILENCE: Duration = Duration::from_secs(900);
/// Interval between checks on a running virtual machine.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Strings in console lines by which the kernel reports a fault in itself, or that it killed a process for lack
/// of memory.
const FAULT_MARKS: [&str; 5] = [
    "WARNING: ",
    "BUG: ",
    "Oops",
    "general protection",
    "Out of memory: ",
];
/// Maximum number of console lines about faults to report.
const MAX_FAULTS: usize = 5;
/// Number of console lines to print from the end.
const TAIL_LINES: usize = 60;

/// Kernel parameters: panic on errors, and skip the self-tests of crypto algorithms, which only take time.
const KERNEL_PARAMETERS: &str = "loglevel=5 oops=panic panic=-1 reboot=t cryptomgr.notests";
/// Kernel parameters for emulated CPUs. The CPU feature `rep_good` is cleared, so that the kernel does not
/// use string instructions to clear and copy pages. It is given as a number, since 5.10 does not accept
/// names.
const EMULATION_PARAMETERS: &str = "tsc=reliable no_timer_check clearcpuid=112";

/// A virtual machine's configuration.
pub(crate) struct Machine<'a> {
    pub(crate) qemu: &'a Qemu,
    pub(crate) kernel: &'a Kernel,
    pub(crate) initramfs: PathBuf,
    pub(crate) cpus: u32,
    pub(crate) accel: Accel,
    /// Maximum run time.
    pub(crate) limit: Duration,
    /// Directory for the virtual machine's log files, which must exist.
    pub(crate) directory: PathBuf,
}

/// The reason why a virtual machine stopped running.
#[derive(Debug)]
pub(crate) enum Termination {
    /// QEMU exited with this status.
    Exited(ExitStatus),
    /// Another process killed QEMU with a signal, about which QEMU printed this message.
    Signalled(String),
    /// QEMU was killed for this reason: there was no output, or the run time exceeded the limit.
    Hung(&'static str),
}

/// The result of running a virtual machine.
#[derive(Debug)]
pub(crate) struct MachineResult {
    pub(crate) termination: Termination,
    pub(crate) report: Report,
    pub(crate) took: Duration,
    /// The last lines of the console and of QEMU's output.
    pub(crate) console: String,
    /// Console lines that report a kernel fault.
    pub(crate) faults: Vec<String>,
}

impl MachineResult {
    /// Returns true if both the exit status and the report indicate success.
    pub(crate) fn is_good(&self) -> bool {
        let has_passed = matches!(
            &self.termination,
            Termination::Exited(status) if status.code() == Some(PASSED_STATUS)
        );
        has_passed && self.report.is_good && self.report.failed.is_empty()
    }

    /// Returns true if the emulator may have caused the failure: the virtual machine hung, or its kernel did
    /// not start init. With two emulated CPUs, one may execute code that the other is patching (`Oops:
    /// int3`).
    pub(crate) const fn should_retry(&self) -> bool {
        match self.termination {
            Termination::Hung(_) => true,
            Termination::Signalled(_) => false,
            Termination::Exited(_) => self.report.booted.is_none(),
        }
    }

    /// Returns the cause of a failure.
    pub(crate) fn cause(&self) -> String {
        match &self.termination {
            Termination::Hung(reason) => (*reason).to_owned(),
            Termination::Signalled(message) => format!("another process ended QEMU: {message}"),
            Termination::Exited(status) if status.code() == Some(0) => {
                "the kernel panicked, or the machine was reset".to_owned()
            }
            Termination::Exited(_) if !self.report.failed_programs.is_empty() => {
                self.report.failed_programs.join("; ")
            }
            Termination::Exited(status) => format!("QEMU ended with {status}"),
        }
    }
}

impl Machine<'_> {
    /// Runs the virtual machine until it exits or is killed.
    pub(crate) fn run(&self) -> Result<MachineResult> {
        let (console, report) = (
            self.directory.join("console.log"),
            self.directory.join("report.log"),
        );
        File::create(&report)?;
        File::create(&console)?;
        let clock = Clock::start();
        let mut command = self.command(&report);
        command.args(["-serial", &format!("file:{}", console.display())]);
        let log = File::create(self.directory.join("qemu.log"))?;
        command.stdin(std::process::Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("cannot start QEMU")?;
        let mut termination = supervise(child, &report, self.limit)?;
        let qemu_output = fs::read(self.directory.join("qemu.log"))?;
        if let Some(message) = signal_message(&String::from_utf8_lossy(&qemu_output)) {
            termination = Termination::Signalled(message);
        }
        let report_text = fs::read(&report)?;
        let console_text = fs::read(&console)?;
        Ok(MachineResult {
            termination,
            report: Report::parse(&String::from_utf8_lossy(&report_text)),
            took: clock.elapsed(),
            console: tail(&console) + &tail(&self.directory.join("qemu.log")),
            faults: kernel_faults(&String::from_utf8_lossy(&console_text)),
        })
    }

    /// Renames the report and console log from a failed attempt, so that the next attempt does not overwrite
    /// them.
    pub(crate) fn rename_logs(&self) -> Result<()> {
        for name in ["report", "console"] {
            let path = |ending: &str| self.directory.join(format!("{name}{ending}"));
            fs::rename(path(".log"), path(".1.log"))?;
        }
        Ok(())
    }

    /// Runs the virtual machine with its console attached to this terminal.
    pub(crate) fn run_on_terminal(&self) -> Result<()> {
        let mut command = self.command(&self.directory.join("report.log"));
        command.args(["-serial", "mon:stdio"]);
        command.status().context("cannot start QEMU")?;
        Ok(())
    }

    fn command(&self, report: &Path) -> Command {
        let mut command = self.qemu.command();
        command
            .args(["-M", "pc"])
            .args(self.accel.arguments())
            .args(["-smp", &self.cpus.to_string(), "-m", MEMORY])
            .args([
                "-nodefaults",
                "-no-user-config",
                "-display",
                "none",
                "-no-reboot",
            ])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(&self.initramfs)
            .args(["-append", &command_line(self.accel)])
            .arg("-chardev")
            .arg(format!("file,id=report,path={}", report.display()))
            .args(["-device", "isa-debugcon,iobase=0xe9,chardev=report"])
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
        command
    }
}

/// Returns QEMU's message about the signal that terminated it, if there was one. The exit status is 0 in that
/// case, as it is after the virtual machine has been reset.
fn signal_message(output: &str) -> Option<String> {
    let mut lines = output.lines().filter_map(|line| line.split_once(": "));
    let (_, message) = lines.find(|(_, message)| message.starts_with("terminating on signal"))?;
    Some(message.to_owned())
}

/// Returns the kernel command line.
fn command_line(accel: Accel) -> String {
    let plain = format!("console=ttyS0 {KERNEL_PARAMETERS}");
    match accel {
        Accel::Virtual => plain,
        Accel::Emulated => format!("{plain} {EMULATION_PARAMETERS}{}", tsc_parameter()),
    }
}

/// Returns the kernel parameter that sets the TSC frequency. On a busy host, a guest would measure a wrong
/// frequency, and its clock would run too fast or too slow.
fn tsc_parameter() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpu_kilohertz(&cpuinfo).map_or_else(String::new, |rate| format!(" tsc_early_khz={rate}"))
}

/// Returns the first CPU's frequency in kHz, from the text of `/proc/cpuinfo`.
fn cpu_kilohertz(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("cpu MHz"))?;
    let (megahertz, decimals) = line.split_once(':')?.1.trim().split_once('.')?;
    let decimals = decimals.get(..3)?;
    let rate = format!("{megahertz}{decimals}");
    rate.parse::<u32>().is_ok().then_some(rate)
}

/// A process that is killed on drop.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Errors are ignored: the process may already have exited.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Waits until a process exits, and kills it once `reason_to_kill` returns a reason.
pub(super) fn wait_or_kill<R>(
    child: Child,
    mut reason_to_kill: impl FnMut() -> Result<Option<R>>,
) -> Result<Result<ExitStatus, R>> {
    let mut child = KillOnDrop(child);
    loop {
        if let Some(status) = child.0.try_wait()? {
            return Ok(Ok(status));
        }
        if let Some(reason) = reason_to_kill()? {
            return Ok(Err(reason));
        }
        sleep();
    }
}

/// Waits until a virtual machine exits, and kills it if it hangs.
fn supervise(child: Child, report: &Path, limit: Duration) -> Result<Termination> {
    let clock = Clock::start();
    let (mut length, mut last_output) = (0, Clock::start());
    let reason_to_kill = || {
        let new_length = fs::metadata(report)?.len();
        if new_length != length {
            (length, last_output) = (new_length, Clock::start());
        }
        Ok(if clock.elapsed() > limit {
            Some("it ran for too long")
        } else if last_output.elapsed() > MAX_SILENCE {
            Some("it stopped reporting")
        } else {
            None
        })
    };
    let result = wait_or_kill(child, reason_to_kill)?;
    Ok(result.map_or_else(Termination::Hung, Termination::Exited))
}

#[expect(
    clippy::disallowed_methods,
    reason = "nothing waits for a process and for a file at the same time"
)]
fn sleep() {
    thread::sleep(POLL_INTERVAL);
}

/// Returns the first few console lines that report a kernel fault.
fn kernel_faults(console: &str) -> Vec<String> {
    let is_fault = |line: &&str| FAULT_MARKS.iter().any(|mark| line.contains(mark));
    let lines = console.lines().filter(is_fault).map(str::to_owned);
    lines.take(MAX_FAULTS).collect()
}

/// Returns the last lines of a file, indented.
fn tail(path: &Path) -> String {
    const MAX_BYTES: u64 = 64 << 10;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(MAX_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    last.iter().map(|line| format!("    {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_the_kernel_reports_about_itself_is_found() {
        let console = "[ 1.0] clocksource: tsc\n[ 2.0] WARNING: CPU: 0 PID: 7 at net/x.c:1\n";

        assert_eq!(kernel_faults(console).len(), 1);
        assert!(kernel_faults("[ 1.0] a warning of no kind\n").is_empty());
    }

    #[test]
    fn a_signal_that_ended_qemu_is_distinguished_from_a_reset() {
        let output = "qemu-system-x86_64: warning: no KVM\n\
                      qemu-system-x86_64: terminating on signal 15 from pid 77 (kill)\n";

        let message = signal_message(output).expect("a message");
        assert_eq!(message, "terminating on signal 15 from pid 77 (kill)");
        assert_eq!(
            signal_message("qemu-system-x86_64: warning: no KVM\n"),
            None
        );
    }

    #[test]
    fn parameters_for_emulation_are_not_passed_with_kvm() {
        assert!(command_line(Accel::Emulated).contains("clearcpuid"));

        let line = command_line(Accel::Virtual);
        assert!(!line.contains("clearcpuid"), "{line}");
        assert!(!line.contains("tsc"), "{line}");
        assert!(Accel::Virtual.arguments().contains(&"host"));
    }

    #[test]
    fn the_frequency_of_the_first_cpu_is_read_in_kilohertz() {
        let cpuinfo = "processor\t: 0\ncpu MHz\t\t: 2596.122\ncache size\t: 1024 KB\n";

        assert_eq!(cpu_kilohertz(cpuinfo).as_deref(), Some("2596122"));
        assert_eq!(cpu_kilohertz("cpu MHz\t: unknown\n"), None);
    }
}
