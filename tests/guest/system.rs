//! Mounts file systems and loads kernel modules, as the init process of a distribution does.

use std::{
    env, fs,
    fs::{File, OpenOptions},
    io::Write as _,
    path::Path,
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    kmod::{ModuleInitFlags, finit_module},
    mount::{MsFlags, mount},
    sys::utsname::uname,
};

/// A file in the initramfs that lists the module files, each after the ones it depends on.
const MODULES: &str = "/etc/modules.list";
/// A file that lists the modules that the kernel requested but the initramfs lacks.
const MISSING_MODULES: &str = "/run/wanted";
/// A file that lists the skipped tests, each with the kernel feature that is missing. The plan gives the
/// tests the path of this file.
const SKIPS: &str = "/run/skips";
/// The sysctl that contains the path of the program that the kernel runs to load a module.
const MODPROBE: &str = "/proc/sys/kernel/modprobe";

const FILE_SYSTEMS: [(&str, &str); 9] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("bpf", "/sys/fs/bpf"),
    ("debugfs", "/sys/kernel/debug"),
    ("tracefs", "/sys/kernel/tracing"),
];

pub(crate) fn mount_all() -> Result<()> {
    for (kind, directory) in FILE_SYSTEMS {
        fs::create_dir_all(directory).with_context(|| format!("cannot make {directory}"))?;
        let mounted = mount(
            Some(kind),
            directory,
            Some(kind),
            MsFlags::empty(),
            None::<&str>,
        );
        match mounted {
            // The kernel may already have mounted /dev.
            Ok(()) | Err(Errno::EBUSY) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot mount {kind} on {directory}"));
            }
        }
    }
    fs::write(MODPROBE, "/init").with_context(|| format!("cannot write {MODPROBE}"))
}

/// Returns the kernel release.
pub(crate) fn release() -> Result<String> {
    Ok(uname()?.release().to_string_lossy().into_owned())
}

/// Returns the time since the virtual machine started, in seconds.
pub(crate) fn uptime() -> Result<f64> {
    let text = fs::read_to_string("/proc/uptime")?;
    let first = text.split(' ').next().context("/proc/uptime is empty")?;
    Ok(first.parse()?)
}

/// The results of loading the modules.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    pub(crate) loaded: u32,
    /// The modules that could not be loaded, each with the error.
    pub(crate) refused: Vec<String>,
}

pub(crate) fn load_modules() -> Result<Modules> {
    // Otherwise, every network namespace gets a link of each kind of IP tunnel, which tests don't expect.
    fs::write("/proc/sys/net/core/fb_tunnels_only_for_init_net", "1")?;
    let list = fs::read_to_string(MODULES).with_context(|| format!("cannot read {MODULES}"))?;
    let mut modules = Modules::default();
    for path in list.lines() {
        match load(Path::new(path)) {
            Ok(()) => modules.loaded += 1,
            Err(error) => modules.refused.push(format!("{path}: {error:#}")),
        }
    }
    Ok(modules)
}

fn load(path: &Path) -> Result<()> {
    let file = File::open(path)?;
    match finit_module(&file, c"", ModuleInitFlags::empty()) {
        Ok(()) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Records the name of a module that the kernel requests. The initramfs contains only the modules in the
/// list, which have been loaded already, so the name is merely reported.
pub(crate) fn record_missing_module() -> ExitCode {
    let name = env::args().next_back().unwrap_or_default();
    let record = || -> std::io::Result<()> {
        let mut missing = OpenOptions::new()
            .create(true)
            .append(true)
            .open(MISSING_MODULES)?;
        writeln!(missing, "{name}")
    };
    // The kernel continues without the module, no matter which code this process exits with.
    if record().is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Returns the names of the missing modules, sorted and without duplicates.
pub(crate) fn missing_modules() -> Vec<String> {
    lines(MISSING_MODULES)
}

/// Returns the skipped tests, each with the kernel feature that is missing.
pub(crate) fn skips() -> Vec<String> {
    lines(SKIPS)
}

fn lines(path: &str) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let mut names: Vec<String> = text.lines().map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}
