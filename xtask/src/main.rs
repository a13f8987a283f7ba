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
    /// Find or install what building and testing needs; run by root it installs Debian packages.
    Setup {
        /// Only report; fails when something is missing.
        #[arg(long)]
        check: bool,
        /// Also what `cargo xtask lint` needs.
        #[arg(long)]
        lint: bool,
    },
    /// Compile the kernel programs and show what the object holds.
    Ebpf,
    /// Run the test tiers: all, or the one named.
    Test {
        tier: Option<test::Tier>,
        /// For the test programs: a filter, `--nocapture`, ...
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Show Culvert at work in network namespaces of this machine (root).
    Demo {
        /// Leave the namespaces for looking around.
        #[arg(long)]
        keep: bool,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run the tests that a kernel decides on the pinned kernels, in virtual machines (root).
    Vm(vm::Options),
    /// Give parsers mutated inputs, and look for one that panics or hangs.
    Fuzz(fuzz::Options),
    /// Measure (root).
    Bench {
        which: Bench,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run real Kubernetes on this machine, in network namespaces, and try everything on it (root).
    E2e(e2e::Options),
    /// Build the container image for linux/amd64, as an archive that `ctr images import` loads.
    Package {
        /// How the program is built: `vm` is quicker to build, and for tests.
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
        /// Repair what a tool can repair by itself first.
        #[arg(long)]
        fix: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Bench {
    /// What a connect through a VIP costs.
    Connect,
    /// How fast a change is in the kernel.
    Program,
    /// How fast the API server's word is in the kernel, beside kube-proxy (needs Go, as e2e does).
    Api,
    /// What a stream through the tunnel costs, beside plain TCP and bare TLS.
    Tunnel,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not as a result of `main`: RUST_BACKTRACE would bury the message.
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
