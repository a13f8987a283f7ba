//! A virtual machine in QEMU.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{accel::Accel, fetch::Kernel, qemu::Qemu, report::Report, suite};
use crate::progress::Clock;

/// The exit status of a machine if everything passed: the guest writes 0x10, and QEMU returns twice that
/// plus one.
const PASSED: i32 = 33;
/// The memory of a machine, in MiB.
const MEMORY: &str = "768";
/// The maximum run time of a machine: longer than its longest program. The maximum time without output:
/// longer than the timeout of a test.
pub(super) const LIMIT: Duration = Duration::from_secs(suite::LIMIT + 300);
const SILENCE: Duration = Duration::from_secs(420);
/// The interval of checks.
const LOOK: Duration = Duration::from_millis(100);
/// The kernel messages that report a fault of the kernel itself.
const ALARMS: [&str; 4] = ["WARNING: ", "BUG: ", "Oops", "general protection"];
/// The number of such lines that are shown.
const MOST_ALARMS: usize = 5;
/// The number of last console lines that are shown.
const TAIL: usize = 60;

/// Fail at once on errors, and skip self-tests that cost time and protect nothing here.
const COMMAND_LINE: &str = "loglevel=5 oops=panic panic=-1 reboot=t cryptomgr.notests";
/// Options for emulated CPUs. `rep_good` is cleared, so that pages are cleared and copied by plain
/// moves; it is given as a number, since 5.10 takes no names.
const EMULATED: &str = "tsc=reliable no_timer_check clearcpuid=112";

/// The configuration of a machine.
pub(crate) struct Machine<'a> {
    pub(crate) qemu: &'a Qemu,
    pub(crate) kernel: &'a Kernel,
    pub(crate) initramfs: PathBuf,
    pub(crate) cpus: u32,
    pub(crate) accel: Accel,
    /// The maximum run time.
    pub(crate) limit: Duration,
    /// The machine's own folder, which exists.
    pub(crate) folder: PathBuf,
}

/// The end of a machine.
#[derive(Debug)]
pub(crate) enum End {
    /// The machine ended by itself, with this status.
    Exited(ExitStatus),
    /// A foreign signal ended it, with QEMU's message.
    Stopped(String),
    /// The process was killed, because its output stopped or its time was up.
    Hung(&'static str),
}

/// The result of a machine.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) end: End,
    pub(crate) report: Report,
    pub(crate) took: Duration,
    /// The end of its kernel's console output.
    pub(crate) console: String,
    /// The alarming lines of the console.
    pub(crate) alarms: Vec<String>,
}

impl Outcome {
    /// Returns true if the exit status and the report both mean success.
    pub(crate) fn is_good(&self) -> bool {
        let says_so = matches!(&self.end, End::Exited(status) if status.code() == Some(PASSED));
        says_so && self.report.is_good && self.report.failed.is_empty()
    }

    /// Returns true if the cause may be the emulator: the machine hung, or its kernel never reached its
    /// init. With two CPUs, one sometimes executes code that the other is about to patch (`Oops: int3`).
    pub(crate) const fn is_to_be_repeated(&self) -> bool {
        match self.end {
            End::Hung(_) => true,
            End::Stopped(_) => false,
            End::Exited(_) => self.report.booted.is_none(),
        }
    }

    /// Returns the cause of a failure.
    pub(crate) fn why(&self) -> String {
        match &self.end {
            End::Hung(how) => (*how).to_owned(),
            End::Stopped(words) => format!("somebody ended QEMU: {words}"),
            End::Exited(status) if status.code() == Some(0) => {
                "the kernel panicked, or the machine was reset".to_owned()
            }
            End::Exited(_) if !self.report.broken.is_empty() => self.report.broken.join("; "),
            End::Exited(status) => format!("QEMU ended with {status}"),
        }
    }
}

impl Machine<'_> {
    /// Runs the machine to its end.
    pub(crate) fn run(&self) -> Result<Outcome> {
        let (console, report) = (
            self.folder.join("console.log"),
            self.folder.join("report.log"),
        );
        File::create(&report)?;
        File::create(&console)?;
        let clock = Clock::start();
        let mut command = self.command(&report);
        command.args(["-serial", &format!("file:{}", console.display())]);
        let log = File::create(self.folder.join("qemu.log"))?;
        command.stdin(std::process::Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().context("cannot start QEMU")?;
        let mut end = watch(child, &report, self.limit)?;
        let qemu = fs::read(self.folder.join("qemu.log"))?;
        if let Some(words) = stopped(&String::from_utf8_lossy(&qemu)) {
            end = End::Stopped(words);
        }
        let text = fs::read(&report)?;
        let said = fs::read(&console)?;
        Ok(Outcome {
            end,
            report: Report::read(&String::from_utf8_lossy(&text)),
            took: clock.elapsed(),
            console: tail(&console) + &tail(&self.folder.join("qemu.log")),
            alarms: alarms(&String::from_utf8_lossy(&said)),
        })
    }

    /// Renames the report and console of this attempt, before the next one.
    pub(crate) fn keep_report(&self) -> Result<()> {
        for name in ["report", "console"] {
            let path = |ending: &str| self.folder.join(format!("{name}{ending}"));
            fs::rename(path(".log"), path(".1.log"))?;
        }
        Ok(())
    }

    /// Runs the machine on this terminal.
    pub(crate) fn show(&self) -> Result<()> {
        let mut command = self.command(&self.folder.join("report.log"));
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

/// Returns QEMU's message if a signal ended it: its exit status is then that of a machine that was
/// reset.
fn stopped(said: &str) -> Option<String> {
    let mut lines = said.lines().filter_map(|line| line.split_once(": "));
    let (_, words) = lines.find(|(_, words)| words.starts_with("terminating on signal"))?;
    Some(words.to_owned())
}

/// Returns the kernel's command line.
fn command_line(accel: Accel) -> String {
    let plain = format!("console=ttyS0 {COMMAND_LINE}");
    match accel {
        Accel::Virtual => plain,
        Accel::Emulated => format!("{plain} {EMULATED}{}", clock_rate()),
    }
}

/// Returns the option with the TSC's rate: on a busy machine, guests measure it wrongly, and their clock
/// runs away.
fn clock_rate() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    kilohertz(&cpus).map_or_else(String::new, |rate| format!(" tsc_early_khz={rate}"))
}

/// Returns the rate of the first CPU in `/proc/cpuinfo`, in kHz.
fn kilohertz(cpus: &str) -> Option<String> {
    let line = cpus.lines().find(|line| line.starts_with("cpu MHz"))?;
    let (whole, part) = line.split_once(':')?.1.trim().split_once('.')?;
    let part = part.get(..3)?;
    let rate = format!("{whole}{part}");
    rate.parse::<u32>().is_ok().then_some(rate)
}

/// A process that is killed on drop.
struct Kept(Child);

impl Drop for Kept {
    fn drop(&mut self) {
        // The process has ended, or must end: an error of either call is of no use.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Waits for the end of a process, or kills it once there is a reason.
pub(super) fn ended<R>(
    child: Child,
    mut reason: impl FnMut() -> Result<Option<R>>,
) -> Result<Result<ExitStatus, R>> {
    let mut child = Kept(child);
    loop {
        if let Some(status) = child.0.try_wait()? {
            return Ok(Ok(status));
        }
        if let Some(reason) = reason()? {
            return Ok(Err(reason));
        }
        pause();
    }
}

/// Waits for the end of a machine, or kills it.
fn watch(child: Child, report: &Path, limit: Duration) -> Result<End> {
    let clock = Clock::start();
    let (mut length, mut heard) = (0, Clock::start());
    let hung = || {
        let now = fs::metadata(report)?.len();
        if now != length {
            (length, heard) = (now, Clock::start());
        }
        Ok(if clock.elapsed() > limit {
            Some("it went on for too long")
        } else if heard.elapsed() > SILENCE {
            Some("it said nothing any more")
        } else {
            None
        })
    };
    Ok(ended(child, hung)?.map_or_else(End::Hung, End::Exited))
}

#[expect(
    clippy::disallowed_methods,
    reason = "a process and a file can't be waited for at once"
)]
fn pause() {
    thread::sleep(LOOK);
}

/// Returns the console lines that report a fault of the kernel.
fn alarms(console: &str) -> Vec<String> {
    let is_alarm = |line: &&str| ALARMS.iter().any(|alarm| line.contains(alarm));
    let lines = console.lines().filter(is_alarm).map(str::to_owned);
    lines.take(MOST_ALARMS).collect()
}

/// Returns the last lines of a file.
fn tail(path: &Path) -> String {
    const MOST: u64 = 64 << 10;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(MOST)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(TAIL)..];
    last.iter().map(|line| format!("    {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_finds_a_fault_in_itself_is_heard() {
        let console = "[ 1.0] clocksource: tsc\n[ 2.0] WARNING: CPU: 0 PID: 7 at net/x.c:1\n";

        assert_eq!(alarms(console).len(), 1);
        assert!(alarms("[ 1.0] a warning of no kind\n").is_empty());
    }

    #[test]
    fn a_signal_that_ended_the_emulator_is_told_apart_from_a_reset() {
        let said = "qemu-system-x86_64: warning: no KVM\n\
                    qemu-system-x86_64: terminating on signal 15 from pid 77 (kill)\n";

        let stop = stopped(said).expect("a stop");
        assert_eq!(stop, "terminating on signal 15 from pid 77 (kill)");
        assert_eq!(stopped("qemu-system-x86_64: warning: no KVM\n"), None);
    }

    #[test]
    fn what_helps_an_emulator_is_not_for_virtual_cpus() {
        assert!(command_line(Accel::Emulated).contains("clearcpuid"));

        let line = command_line(Accel::Virtual);
        assert!(!line.contains("clearcpuid"), "{line}");
        assert!(!line.contains("tsc"), "{line}");
        assert!(Accel::Virtual.arguments().contains(&"host"));
    }

    #[test]
    fn the_rate_of_the_clock_is_that_of_the_first_cpu_in_kilohertz() {
        let cpus = "processor\t: 0\ncpu MHz\t\t: 2596.122\ncache size\t: 1024 KB\n";

        assert_eq!(kilohertz(cpus).as_deref(), Some("2596122"));
        assert_eq!(kilohertz("cpu MHz\t: unknown\n"), None);
    }
}
