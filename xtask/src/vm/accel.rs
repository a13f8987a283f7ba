//! Virtual CPUs by KVM, or emulated ones. A `/dev/kvm` that opens may still fail to run a kernel, so one
//! is booted as a probe, once.

use std::{fs, io, path::Path, time::Duration};

use anyhow::Result;

use super::{Machines, cache, fetch::Kernel, native, suite::Plan};

/// The boot time after which KVM counts as broken, or slower than emulation.
const LIMIT: Duration = Duration::from_secs(20);

const DEVICE: &str = "/dev/kvm";

/// The source of a machine's CPUs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Accel {
    /// CPUs of KVM.
    Virtual,
    /// CPUs of QEMU's translation (TCG).
    Emulated,
}

impl Accel {
    /// Returns the arguments for QEMU. Emulated CPUs have all features except fast string copies, which
    /// the emulator executes byte by byte.
    pub(crate) const fn arguments(self) -> [&'static str; 4] {
        match self {
            Self::Virtual => ["-accel", "kvm", "-cpu", "host"],
            Self::Emulated => ["-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm"],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Virtual => "virtual CPUs (KVM)",
            Self::Emulated => "emulated CPUs",
        }
    }
}

/// Finds out if KVM boots a kernel; the result is cached for this kernel and QEMU of the host.
pub(super) fn chosen(machines: &Machines, kernel: &Kernel) -> Result<Accel> {
    if let Err(error) = fs::File::options().read(true).write(true).open(DEVICE) {
        println!("machines have emulated CPUs: {DEVICE}: {error}");
        return Ok(Accel::Emulated);
    }
    let path = cache::place("kvm");
    let asked = format!("{} {}", native::release(), machines.qemu.version());
    let accel = if let Some(known) = read(&path, &asked) {
        known
    } else {
        let accel = tried(machines, kernel)?;
        let text = format!("{asked}\n{}\n", accel.name());
        cache::file(&path, |file| {
            Ok(io::Write::write_all(file, text.as_bytes())?)
        })?;
        accel
    };
    let why = match accel {
        Accel::Virtual => "",
        Accel::Emulated => ": KVM opens, and boots no kernel",
    };
    println!("machines have {}{why}", accel.name());
    Ok(accel)
}

/// Reads the cached result for a host.
fn read(path: &Path, asked: &str) -> Option<Accel> {
    let text = fs::read_to_string(path).ok()?;
    let (of, answer) = text.split_once('\n')?;
    let all = [Accel::Virtual, Accel::Emulated];
    let answer = all.into_iter().find(|it| it.name() == answer.trim())?;
    (of == asked).then_some(answer)
}

/// Boots a kernel to its init and a program.
fn tried(machines: &Machines, kernel: &Kernel) -> Result<Accel> {
    println!("trying whether {DEVICE} boots Linux {} ...", kernel.release);
    let mut machine = machines.machine(kernel, &Plan::nothing())?;
    machine.accel = Accel::Virtual;
    machine.limit = LIMIT;
    let outcome = machine.run()?;
    Ok(if outcome.is_good() {
        Accel::Virtual
    } else {
        println!("  {}", outcome.why());
        Accel::Emulated
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_that_of_one_host_and_emulator() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kvm");
        assert_eq!(read(&path, "6.1 QEMU 7"), None);

        fs::write(&path, "6.1 QEMU 7\nvirtual CPUs (KVM)\n").expect("written");

        assert_eq!(read(&path, "6.1 QEMU 7"), Some(Accel::Virtual));
        assert_eq!(read(&path, "6.2 QEMU 7"), None);
    }
}
