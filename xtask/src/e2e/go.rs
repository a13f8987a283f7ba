//! Kubernetes and CoreDNS, built from the modules in `tests/cluster`, where their versions are
//! pinned.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{progress, vm::archive, workspace};

/// The oldest Go release that can build the modules.
const OLDEST: (u32, u32) = (1, 26);
/// The path used by Go's own installer.
const USUAL: &str = "/usr/local/go/bin/go";
const KUBERNETES: &str = "k8s.io/kubernetes";

/// The programs of one call of `go`.
struct Batch {
    module: &'static str,
    /// True if the program is a test binary.
    is_test: bool,
    /// The packages, each a program named after its last path element.
    packages: &'static [&'static str],
    /// The names of the programs.
    programs: &'static [&'static str],
}

/// In this order, each build finds the preceding one's objects in Go's cache.
const BATCHES: [Batch; 3] = [
    Batch {
        module: "k8s",
        is_test: false,
        packages: &[
            "k8s.io/kubernetes/cmd/kube-apiserver",
            "k8s.io/kubernetes/cmd/kube-controller-manager",
            "k8s.io/kubernetes/cmd/kube-proxy",
            "k8s.io/kubernetes/cmd/kube-scheduler",
            "k8s.io/kubernetes/cmd/kubectl",
            "k8s.io/kubernetes/cmd/kubelet",
            "k8s.io/kubernetes/test/images/agnhost",
            "k8s.io/kubernetes/test/images/regression-issue-74839",
            "github.com/onsi/ginkgo/v2/ginkgo",
        ],
        programs: &[
            "kube-apiserver",
            "kube-controller-manager",
            "kube-proxy",
            "kube-scheduler",
            "kubectl",
            "kubelet",
            "agnhost",
            "regression-issue-74839",
            "ginkgo",
        ],
    },
    Batch {
        module: "k8s",
        is_test: true,
        packages: &["k8s.io/kubernetes/test/e2e"],
        programs: &["e2e.test"],
    },
    Batch {
        module: "coredns",
        is_test: false,
        packages: &["github.com/coredns/coredns"],
        programs: &["coredns"],
    },
];

/// A Go of a sufficient release.
#[derive(Debug)]
pub(super) struct Go {
    program: PathBuf,
    version: String,
}

impl Go {
    /// Finds Go in PATH, or at its usual path.
    pub(super) fn find() -> Result<Self> {
        let (major, minor) = OLDEST;
        let hint = format!(
            "e2e builds Kubernetes, and needs Go {major}.{minor} or newer for it: in PATH, or as \
             {USUAL} (https://go.dev/dl)"
        );
        let usual = || Some(PathBuf::from(USUAL)).filter(|path| path.is_file());
        let Some(program) = workspace::program("go").or_else(usual) else {
            bail!("there is no Go. {hint}");
        };
        let said = archive::output(
            Command::new(&program)
                .env("GOTOOLCHAIN", "local")
                .args(["env", "GOVERSION"]),
        )?;
        let version = said.trim().to_owned();
        ensure!(
            release(&version).is_some_and(|release| release >= OLDEST),
            "{} is {version}. {hint}",
            program.display()
        );
        Ok(Self { program, version })
    }

    /// Returns a call of Go in the folder of a module.
    fn command(&self, module: &str) -> Command {
        let mut command = Command::new(&self.program);
        let path = env::var_os("PATH").unwrap_or_default();
        let own = self.program.parent().map(Path::to_owned);
        let folders = env::split_paths(&path).chain(own);
        command
            .current_dir(folder(module))
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "")
            .env("GOTOOLCHAIN", "local");
        if let Ok(path) = env::join_paths(folders) {
            command.env("PATH", path);
        }
        command
    }
}

/// Parses a version: `go1.26.8` is release 1.26.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("go")?.split(['.', '-', 'r', 'b']);
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

/// Builds the programs that are missing, or were built from another source.
pub(super) fn build(go: &Go, place: &Path) -> Result<()> {
    let programs = place.join("bin");
    fs::create_dir_all(&programs).with_context(|| format!("cannot make {}", programs.display()))?;
    for batch in &BATCHES {
        let source = batch.source(go)?;
        let stamp = place.join("stamps").join(batch.programs.join("+"));
        let is_there = |name: &&str| programs.join(name).is_file();
        if super::is_made_from(&stamp, &source) && batch.programs.iter().all(is_there) {
            continue;
        }
        let label = format!("build {}", batch.programs.join(", "));
        let scratch = tempfile::tempdir_in(place)?;
        let mut command = batch.command(go, &programs)?;
        progress::step(&label, command.env("GOTMPDIR", scratch.path()))?;
        super::stamp(&stamp, &source)?;
    }
    Ok(())
}

/// Returns the certificate of `agnhost` and its key, which are next to its source.
pub(super) fn agnhost_files() -> Result<[PathBuf; 2]> {
    let go = Go::find()?;
    let mut command = go.command("k8s");
    command.args(["list", "-m", "-f", "{{.Dir}}", KUBERNETES]);
    let source = PathBuf::from(archive::output(&mut command)?.trim());
    let folder = source.join("test/images/agnhost/porter");
    Ok(["localhost.crt", "localhost.key"].map(|name| folder.join(name)))
}

impl Batch {
    /// Returns all inputs of the build.
    fn source(&self, go: &Go) -> Result<String> {
        let mut text = format!(
            "{}\n{}\n{}\n",
            go.version,
            self.linker_flags()?,
            self.packages.join(" ")
        );
        for name in ["go.mod", "go.sum"] {
            text.push_str(&read(&folder(self.module).join(name))?);
        }
        Ok(text)
    }

    fn command(&self, go: &Go, programs: &Path) -> Result<Command> {
        let mut command = go.command(self.module);
        // `build` takes a folder, and names the programs itself.
        let output = if self.is_test {
            command.args(["test", "-c"]);
            programs.join(self.programs.concat())
        } else {
            command.arg("build");
            programs.join("")
        };
        command
            .args(["-trimpath", "-buildvcs=false", "-ldflags"])
            .arg(self.linker_flags()?)
            .arg("-o")
            .arg(output)
            .args(self.packages);
        Ok(command)
    }

    /// Returns the linker flags. Without the version, Kubernetes reports v0.0.0-master, and version
    /// checks fail.
    fn linker_flags(&self) -> Result<String> {
        let mut flags = "-s -w".to_owned();
        if self.module != "k8s" {
            return Ok(flags);
        }
        let module = read(&folder(self.module).join("go.mod"))?;
        let version = required(&module, KUBERNETES).context("go.mod requires no Kubernetes")?;
        let mut numbers = version.trim_start_matches('v').split('.');
        for (name, value) in [
            ("gitVersion", Some(version)),
            ("gitMajor", numbers.next()),
            ("gitMinor", numbers.next()),
        ] {
            let value = value.unwrap_or_default();
            flags.push_str(&format!(" -X k8s.io/component-base/version.{name}={value}"));
        }
        Ok(flags)
    }
}

/// Returns the version that a module file requires of another module.
fn required<'a>(text: &'a str, module: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace().filter(|word| *word != "require");
        (words.next()? == module).then(|| words.next())?
    })
}

fn folder(module: &str) -> PathBuf {
    workspace::root().join("tests/cluster").join(module)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_the_first_two_numbers_of_a_version() {
        assert_eq!(release("go1.26.8"), Some((1, 26)));
        assert_eq!(release("go1.27rc1"), Some((1, 27)));
        assert_eq!(release("devel"), None);
    }

    #[test]
    fn a_module_is_found_by_its_whole_name() {
        let text = "require (\n\tk8s.io/kubernetes-csi v1.0.0\n\tk8s.io/kubernetes v1.36.3 // x\n)";

        assert_eq!(required(text, KUBERNETES), Some("v1.36.3"));
        assert_eq!(required(text, "k8s.io/api"), None);
    }

    #[test]
    fn what_is_pinned_is_what_is_built() {
        for batch in &BATCHES {
            let text = read(&folder(batch.module).join("go.mod")).expect("a module file");
            for package in batch.packages.iter().filter(|_| !batch.is_test) {
                // One package is an image of Kubernetes' own tests, which needs no `require`.
                let is_tool = text.contains(package) || package.contains("/test/images/");
                assert!(is_tool, "{package}");
            }
        }
    }
}
