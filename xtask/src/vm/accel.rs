//! Virtual CPUs of the machine's own, or emulated ones. A `/dev/kvm` that opens need not run a kernel, so
//! it is tried with one, once.

use std::{fs, io, path::Path, time::Duration};

use anyhow::Result;

use super::{Machines, cache, fetch::Kernel, native, suite::Plan};

/// A kernel that is not up by then on virtual CPUs never is, or is slower than emulated.
const LIMIT: Duration = Duration::from_secs(20);

const DEVICE: &str = "/dev/kvm";

/// How machines get their CPUs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Accel {
    /// From KVM.
    Virtual,
    /// From QEMU's translation (TCG).
    Emulated,
}

impl Accel {
    /// What QEMU is told. Emulated CPUs have all that can be emulated, but what has kernel and libraries
    /// copy with one instruction: emulated, that goes byte by byte.
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

/// Finds out whether KVM boots a kernel; the answer is kept for this kernel and QEMU of the host.
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

/// The answer that is kept for a host.
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
