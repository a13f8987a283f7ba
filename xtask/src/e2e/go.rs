//! Builds Kubernetes and CoreDNS from the Go modules in `tests/cluster`, which pin the versions.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{host, progress, workspace};

/// Oldest Go release that can build the modules.
const OLDEST: (u32, u32) = (1, 26);
/// Path at which Go's official installation puts the program.
const DEFAULT_PATH: &str = "/usr/local/go/bin/go";
const KUBERNETES: &str = "k8s.io/kubernetes";

/// The programs that one `go` command builds.
struct Batch {
    /// The Go module's directory in `tests/cluster`.
    module: &'static str,
    /// True if the only program is a test binary.
    is_test: bool,
    packages: &'static [&'static str],
    /// Names of the programs, in the order of `packages`.
    programs: &'static [&'static str],
}

/// All builds, ordered so that later ones reuse most of Go's build cache.
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

/// An installed Go toolchain that is recent enough.
#[derive(Debug)]
pub(super) struct Go {
    program: PathBuf,
    version: String,
}

impl Go {
    /// Finds Go in `PATH` or at [`DEFAULT_PATH`].
    pub(super) fn find() -> Result<Self> {
        let (major, minor) = OLDEST;
        let hint = format!(
            "e2e builds Kubernetes, which needs Go {major}.{minor} or newer in PATH or at \
             {DEFAULT_PATH}. Install it from https://go.dev/dl"
        );
        let default = || Some(PathBuf::from(DEFAULT_PATH)).filter(|path| path.is_file());
        let Some(program) = host::find_program("go").or_else(default) else {
            bail!("Go is not installed. {hint}");
        };
        let output = progress::output(
            Command::new(&program)
                .env("GOTOOLCHAIN", "local")
                .args(["env", "GOVERSION"]),
        )?;
        let version = output.trim().to_owned();
        ensure!(
            parse_release(&version).is_some_and(|release| release >= OLDEST),
            "{} is {version}. {hint}",
            program.display()
        );
        Ok(Self { program, version })
    }

    /// Returns a `go` command that runs in a module's directory.
    fn command(&self, module: &str) -> Command {
        let mut command = Command::new(&self.program);
        let path = env::var_os("PATH").unwrap_or_default();
        let go_directory = self.program.parent().map(Path::to_owned);
        let directories = env::split_paths(&path).chain(go_directory);
        command
            .current_dir(module_directory(module))
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "")
            .env("GOTOOLCHAIN", "local");
        if let Ok(path) = env::join_paths(directories) {
            command.env("PATH", path);
        }
        command
    }
}

/// Parses the first two numbers of a version: `go1.26.8` is release (1, 26).
fn parse_release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("go")?.split(['.', '-', 'r', 'b']);
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

/// Builds the programs that are missing or were built from different inputs; Kubernetes' own specs only if they are wanted.
pub(super) fn build(go: &Go, components: &Path, has_kubernetes_specs: bool) -> Result<()> {
    let programs = components.join("bin");
    fs::create_dir_all(&programs)
        .with_context(|| format!("cannot create {}", programs.display()))?;
    let is_needed = |batch: &&Batch| has_kubernetes_specs || !batch.is_test;
    for batch in BATCHES.iter().filter(is_needed) {
        let inputs = batch.inputs(go)?;
        let stamp = components.join("stamps").join(batch.programs.join("+"));
        let exists = |name: &&str| programs.join(name).is_file();
        if super::is_built_from(&stamp, &inputs) && batch.programs.iter().all(exists) {
            continue;
        }
        let label = format!("build {}", batch.programs.join(", "));
        let scratch = tempfile::tempdir_in(components)?;
        let mut command = batch.command(go, &programs)?;
        progress::step(&label, command.env("GOTMPDIR", scratch.path()))?;
        super::write_stamp(&stamp, &inputs)?;
    }
    Ok(())
}

/// Returns the paths of `agnhost`'s certificate and key, which are among the Kubernetes sources.
pub(super) fn agnhost_certificate() -> Result<[PathBuf; 2]> {
    let go = Go::find()?;
    let mut command = go.command("k8s");
    command.args(["list", "-m", "-f", "{{.Dir}}", KUBERNETES]);
    let sources = PathBuf::from(progress::output(&mut command)?.trim());
    let directory = sources.join("test/images/agnhost/porter");
    Ok(["localhost.crt", "localhost.key"].map(|name| directory.join(name)))
}

impl Batch {
    /// Returns a string that changes whenever any input to the build changes.
    fn inputs(&self, go: &Go) -> Result<String> {
        let mut text = format!(
            "{}\n{}\n{}\n",
            go.version,
            self.linker_flags()?,
            self.packages.join(" ")
        );
        for name in ["go.mod", "go.sum"] {
            text.push_str(&read(&module_directory(self.module).join(name))?);
        }
        Ok(text)
    }

    fn command(&self, go: &Go, programs: &Path) -> Result<Command> {
        let mut command = go.command(self.module);
        // `go build` is given a directory, and names the programs after their packages.
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

    /// Returns the linker flags, which set the version of Kubernetes: version checks would fail with the
    /// default, v0.0.0-master.
    fn linker_flags(&self) -> Result<String> {
        let mut flags = "-s -w".to_owned();
        if self.module != "k8s" {
            return Ok(flags);
        }
        let path = module_directory(self.module).join("go.mod");
        let go_mod = read(&path)?;
        let version = required_version(&go_mod, KUBERNETES)
            .with_context(|| format!("{} does not require {KUBERNETES}", path.display()))?;
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

/// Returns the version of a module that this `go.mod` text requires.
fn required_version<'a>(go_mod: &'a str, module: &str) -> Option<&'a str> {
    go_mod.lines().find_map(|line| {
        let mut words = line.split_whitespace().filter(|word| *word != "require");
        (words.next()? == module).then(|| words.next())?
    })
}

fn module_directory(module: &str) -> PathBuf {
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
        assert_eq!(parse_release("go1.26.8"), Some((1, 26)));
        assert_eq!(parse_release("go1.27rc1"), Some((1, 27)));
        assert_eq!(parse_release("devel"), None);
    }

    #[test]
    fn a_module_is_found_by_its_complete_name() {
        let text = "require (\n\tk8s.io/kubernetes-csi v1.0.0\n\tk8s.io/kubernetes v1.36.3 // x\n)";

        assert_eq!(required_version(text, KUBERNETES), Some("v1.36.3"));
        assert_eq!(required_version(text, "k8s.io/api"), None);
    }

    #[test]
    fn every_package_is_pinned_in_its_go_mod() {
        for batch in &BATCHES {
            let text = read(&module_directory(batch.module).join("go.mod")).expect("a go.mod");
            for package in batch.packages.iter().filter(|_| !batch.is_test) {
                // Kubernetes' test images are pinned together with Kubernetes itself.
                let is_tool = text.contains(package) || package.contains("/test/images/");
                assert!(is_tool, "{package}");
            }
        }
    }
}
