//! `cargo xtask`: sets up, builds, tests and checks Culvert.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this program reports to the terminal"
)]

mod atomic_instructions;
mod bpf_object;
#[path = "../../tunnel-userspace/build/compile.rs"]
mod compile;
mod demo;
mod e2e;
mod ebpf;
mod file_length;
mod fuzz;
mod host;
mod lint;
mod module_dependencies;
mod package;
mod progress;
mod setup;
mod static_build;
mod test;
#[path = "../../tunnel-userspace/build/toolchain.rs"]
mod toolchain;
mod vm;
mod words;
mod workspace;
mod workspace_binaries;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};

/// Sets up, builds, tests and checks Culvert.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Find or install the tools for building and testing; as root, this installs Debian packages.
    Setup {
        /// Only report what is missing; fail if anything is.
        #[arg(long)]
        check: bool,
        /// Include the tools that `cargo xtask lint` uses.
        #[arg(long)]
        lint: bool,
    },
    /// Compile the kernel programs and list the programs in each object.
    Ebpf,
    /// Run all test tiers, or only the named one.
    Test {
        tier: Option<test::Tier>,
        /// Arguments for the test programs, such as a filter or `--nocapture`.
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Run the demo of Culvert in network namespaces on this machine (needs root).
    Demo {
        /// Keep the namespaces for inspection.
        #[arg(long)]
        keep: bool,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run the kernel-dependent tests on the pinned kernels, in virtual machines (needs root).
    Vm(vm::Options),
    /// Fuzz the parsers: search for inputs that make one panic or hang.
    Fuzz(fuzz::Options),
    /// Run a benchmark (needs root).
    Bench {
        /// Draw charts of each benchmark's last run (`docs/bench-*.svg`) instead.
        #[arg(long)]
        plot: bool,
        #[arg(required_unless_present = "plot")]
        which: Option<Bench>,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run real Kubernetes on this machine, in network namespaces, and test it (needs root).
    E2e(e2e::Options),
    /// Build the container image for linux/amd64, as an archive that `ctr images import` can load.
    Package {
        /// Build profile; `vm` builds faster and is meant for tests.
        #[arg(long, value_enum, default_value = "release")]
        profile: static_build::Profile,
        /// Name of the image, including a tag.
        #[arg(long, default_value = package::NAME)]
        name: String,
        /// Path at which to write the archive.
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Check formatting, lints, documentation, licences, spelling, module dependencies and the BPF objects.
    Lint {
        /// Run only these checks.
        checks: Vec<lint::Check>,
        /// Fix the problems that a tool can fix.
        #[arg(long)]
        fix: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Bench {
    /// The cost of a connect() through a VIP.
    Connect,
    /// The cost of a request from outside the node through a node port.
    Packet,
    /// The time until a change has reached the kernel.
    Program,
    /// The time until a change in the API server has reached the kernel, compared with kube-proxy (needs Go,
    /// as e2e does).
    Api,
    /// The cost of a stream through the tunnel, compared with plain TCP and plain TLS.
    Tunnel,
    /// The time that many agents take to reconnect to a restarted gateway.
    Reconnect,
    /// The time that many agents take to get a certificate at once, and the memory of the controllers (needs Go, as e2e does).
    Certificates,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The error is not returned from `main`, which would print a backtrace if RUST_BACKTRACE is set.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Setup { check, lint } => {
            let scope = setup::Scope {
                lint,
                network: true,
                rules: false,
                fuzz: false,
            };
            if check {
                setup::check(scope)
            } else {
                setup::ensure(scope)
            }
        }
        Command::Ebpf => ebpf::show(),
        Command::Test { tier, args } => test::run(tier, &args),
        Command::Demo { keep, args } => demo::demo(keep, &args),
        Command::Bench { which, args, .. } => match which {
            Some(name) => demo::bench(&progress::value_name(&name), &args),
            None => demo::plot(),
        },
        Command::Vm(options) => {
            let tests = vm::run(&options);
            if options.is_fuzzed() {
                let fuzzing = fuzz::run(&fuzz::Options::ALL);
                return tests.and(fuzzing);
            }
            tests
        }
        Command::Fuzz(options) => fuzz::run(&options),
        Command::E2e(options) => e2e::run(&options),
        Command::Package {
            profile,
            name,
            output,
        } => package::run(profile, name, output),
        Command::Lint { checks, fix } => lint::run(&checks, fix),
    }
}
