//! Chooses between KVM and emulated CPUs. Even if `/dev/kvm` can be opened, a kernel may fail to boot, so one
//! is booted as a probe, and the result is cached.

use std::{fs, io, path::Path, time::Duration};

use anyhow::Result;

use super::{Machines, download_cache, kernel_download::Kernel, native, test_plan::Plan};

/// Time within which a kernel must boot with KVM; otherwise, KVM is not used.
const BOOT_LIMIT: Duration = Duration::from_secs(20);

const DEVICE: &str = "/dev/kvm";

/// The accelerator that QEMU uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Accel {
    /// KVM.
    Virtual,
    /// QEMU's emulation (TCG).
    Emulated,
}

impl Accel {
    /// Returns QEMU's arguments for this accelerator. Emulated CPUs have all features except fast string
    /// copies, which QEMU executes byte by byte.
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

/// Returns KVM if it can boot a kernel, otherwise emulation. The result is cached for this combination of the
/// host's kernel release and QEMU's version.
pub(super) fn detect(machines: &Machines, kernel: &Kernel) -> Result<Accel> {
    if let Err(error) = fs::File::options().read(true).write(true).open(DEVICE) {
        println!("machines have emulated CPUs: cannot open {DEVICE}: {error}");
        return Ok(Accel::Emulated);
    }
    let path = download_cache::path("kvm");
    let host = format!("{} {}", native::release(), machines.qemu.version());
    let accel = if let Some(cached) = read_cached(&path, &host) {
        cached
    } else {
        let accel = probe(machines, kernel)?;
        let text = format!("{host}\n{}\n", accel.name());
        download_cache::write_file(&path, |file| {
            Ok(io::Write::write_all(file, text.as_bytes())?)
        })?;
        accel
    };
    let reason = match accel {
        Accel::Virtual => "",
        Accel::Emulated => ": KVM is present, but does not boot a kernel",
    };
    println!("machines have {}{reason}", accel.name());
    Ok(accel)
}

/// Reads the cached result; returns `None` if it is from another host.
fn read_cached(path: &Path, host: &str) -> Option<Accel> {
    let text = fs::read_to_string(path).ok()?;
    let (cached_host, name) = text.split_once('\n')?;
    let all = [Accel::Virtual, Accel::Emulated];
    let accel = all.into_iter().find(|accel| accel.name() == name.trim())?;
    (cached_host == host).then_some(accel)
}

/// Boots a kernel with KVM, and runs one program in it.
fn probe(machines: &Machines, kernel: &Kernel) -> Result<Accel> {
    println!("probing if {DEVICE} boots Linux {} ...", kernel.release);
    let mut machine = machines.machine(kernel, &Plan::probe())?;
    machine.accel = Accel::Virtual;
    machine.limit = BOOT_LIMIT;
    let result = machine.run()?;
    Ok(if result.is_good() {
        Accel::Virtual
    } else {
        println!("  {}", result.cause());
        Accel::Emulated
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_result_applies_only_to_its_host_and_version_of_qemu() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("kvm");
        assert_eq!(read_cached(&path, "6.1 QEMU 7"), None);

        fs::write(&path, "6.1 QEMU 7\nvirtual CPUs (KVM)\n").expect("written");

        assert_eq!(read_cached(&path, "6.1 QEMU 7"), Some(Accel::Virtual));
        assert_eq!(read_cached(&path, "6.2 QEMU 7"), None);
    }
}
