//! `cargo xtask`: sets up, builds, tests and checks Culvert.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing what it does is the job of this program"
)]

mod atomics;
#[path = "../../tunnel-userspace/build/compile.rs"]
mod compile;
mod demo;
mod e2e;
mod ebpf;
mod elf;
mod fuzz;
mod layers;
mod length;
mod lint;
mod package;
mod progress;
mod setup;
mod statics;
mod test;
#[path = "../../tunnel-userspace/build/toolchain.rs"]
mod toolchain;
mod vm;
mod words;
mod workspace;

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
    /// Find or install the tools for building and testing; as root it installs Debian packages.
    Setup {
        /// Only report; fails if something is missing.
        #[arg(long)]
        check: bool,
        /// Also the tools of `cargo xtask lint`.
        #[arg(long)]
        lint: bool,
    },
    /// Compile the kernel programs and show the content of the object.
    Ebpf,
    /// Run all test tiers, or the named one.
    Test {
        tier: Option<test::Tier>,
        /// Arguments of the test programs: a filter, `--nocapture`, ...
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Show Culvert at work in network namespaces of this machine (root).
    Demo {
        /// Keep the namespaces for inspection.
        #[arg(long)]
        keep: bool,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run the tests that depend on the kernel on the pinned kernels, in virtual machines (root).
    Vm(vm::Options),
    /// Feed mutated inputs to parsers, and search for one that panics or hangs.
    Fuzz(fuzz::Options),
    /// Run a benchmark (root).
    Bench {
        which: Bench,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run real Kubernetes on this machine, in network namespaces, and test it (root).
    E2e(e2e::Options),
    /// Build the container image for linux/amd64, as an archive that `ctr images import` loads.
    Package {
        /// The build profile: `vm` builds faster, and is meant for tests.
        #[arg(long, value_enum, default_value = "release")]
        profile: statics::Profile,
        /// The name that the image is loaded under, with a tag.
        #[arg(long, default_value = package::NAME)]
        name: String,
        /// The archive.
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Check format, lints, documents, licences, spelling, layers and the object.
    Lint {
        /// Only these checks.
        checks: Vec<lint::Check>,
        /// First repair the problems that a tool can repair.
        #[arg(long)]
        fix: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Bench {
    /// The cost of a connect through a VIP.
    Connect,
    /// The time until a change is in the kernel.
    Program,
    /// The time until a change in the API server is in the kernel, next to kube-proxy (needs Go, as e2e
    /// does).
    Api,
    /// The cost of a stream through the tunnel, next to plain TCP and bare TLS.
    Tunnel,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not returned from `main`: with RUST_BACKTRACE, its report would bury the message.
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
        Command::Bench { which, args } => demo::bench(&progress::word(&which), &args),
        Command::Vm(options) => {
            let matrix = vm::run(&options);
            if options.is_fuzzed() {
                let fuzzed = fuzz::run(&fuzz::Options::ALL);
                return matrix.and(fuzzed);
            }
            matrix
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
