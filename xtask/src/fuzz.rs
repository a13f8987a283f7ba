//! Builds the fuzz targets (`tests/fuzz`) with coverage counters, using the stable compiler, and runs them
//! with libFuzzer.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, ValueEnum};

use crate::{
    progress::{self, Clock, Outcome},
    setup, workspace,
};

/// The target, which is named explicitly so that Cargo does not apply the flags to build scripts and macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Compiler flags that count branches and report comparisons to libFuzzer (LLVM's SanitizerCoverage).
const COVERAGE_FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                              -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                              -Cllvm-args=-sanitizer-coverage-pc-table \
                              -Cllvm-args=-sanitizer-coverage-trace-compares --cfg=fuzzing";

/// Number of seconds after which an input is reported as a hang.
const HANG_SECONDS: u32 = 10;

/// Interval between progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Text that libFuzzer prints before the path of an input that made a parser panic or hang.
const CRASH_PREFIX: &str = "Test unit written to ";

/// Options for `cargo xtask fuzz`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Fuzz only this parser.
    #[arg(value_enum)]
    parser: Option<Parser>,
    /// Time to spend on each parser, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Run the parser once, on this input.
    #[arg(long, value_name = "FILE", requires = "parser")]
    input: Option<PathBuf>,
}

impl Options {
    /// All parsers, each for the default time.
    pub(crate) const ALL: Self = Self {
        parser: None,
        seconds: 60,
        input: None,
    };
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Parser {
    /// Kubernetes manifests.
    Manifests,
    /// kube-proxy's configuration.
    #[value(name = "kube_proxy")]
    KubeProxy,
    /// The kernel's replies about sockets.
    #[value(name = "sock_diag")]
    SockDiag,
    /// BTF, the kernel's type information.
    Btf,
    /// HTTP/2 headers of tunnel streams.
    TunnelMessages,
    /// The headers of packets.
    Packet,
    /// Certificate signing requests.
    #[value(name = "certificate_request")]
    CertificateRequest,
}

impl Parser {
    const ALL: [Self; 7] = [
        Self::Manifests,
        Self::KubeProxy,
        Self::SockDiag,
        Self::Btf,
        Self::TunnelMessages,
        Self::Packet,
        Self::CertificateRequest,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Manifests => "manifests",
            Self::KubeProxy => "kube_proxy",
            Self::SockDiag => "sock_diag",
            Self::Btf => "btf",
            Self::TunnelMessages => "tunnel_messages",
            Self::Packet => "packet",
            Self::CertificateRequest => "certificate_request",
        }
    }
}

/// Builds the targets and runs them one after another.
pub(crate) fn run(options: &Options) -> Result<()> {
    setup::ensure(setup::Scope {
        fuzz: true,
        ..setup::Scope::default()
    })?;
    let programs = build()?;
    if let (Some(parser), Some(input)) = (options.parser, &options.input) {
        let mut command = Command::new(programs.join(parser.name()));
        ensure!(
            progress::run_visibly(command.arg(input))?,
            "the parser {} failed on {}",
            parser.name(),
            input.display()
        );
        return Ok(());
    }
    let parsers = options
        .parser
        .map_or_else(|| Parser::ALL.to_vec(), |parser| vec![parser]);
    let run = |parser: &Parser| {
        progress::run_part(parser.name(), || {
            fuzz(*parser, &programs, options.seconds).map(|()| Outcome::Passed)
        })
    };
    let rows: Vec<_> = parsers.iter().map(run).collect();
    ensure!(
        progress::summarise("parser", &rows),
        "a parser panicked or hung"
    );
    Ok(())
}

/// Returns the directory for programs, inputs and logs.
fn directory() -> PathBuf {
    workspace::root().join("target/fuzz")
}

/// Builds all fuzz targets; returns the directory that contains them.
fn build() -> Result<PathBuf> {
    let mut command = workspace::cargo("build");
    command
        .args(["--package", "tunnel-fuzz", "--bins", "--features", "engine"])
        .args(["--profile", "fuzz", "--target", TARGET, "--target-dir"])
        .arg(directory())
        .env("RUSTFLAGS", COVERAGE_FLAGS)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    ensure!(progress::run_visibly(&mut command)?, "cargo build failed");
    Ok(directory().join(TARGET).join("fuzz"))
}

/// Fuzzes a parser, starting with the seeds and the inputs from earlier runs. Writes the target's output to a
/// log file.
fn fuzz(parser: Parser, programs: &Path, seconds: u32) -> Result<()> {
    let name = parser.name();
    let (found, crashes) = (
        directory().join("found").join(name),
        directory().join("crashes"),
    );
    for directory in [&found, &crashes] {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
    }
    let log_path = directory().join(format!("{name}.log"));
    let mut log = File::create(&log_path)?;
    let mut child = Command::new(programs.join(name))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={HANG_SECONDS}"))
        .args(["-use_value_profile=1", "-print_final_stats=1"])
        .arg(format!("-artifact_prefix={}/{name}-", crashes.display()))
        .arg(&found)
        .arg(workspace::root().join("tests/fuzz/corpus").join(name))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let (start, mut next_report, mut crash) = (Clock::start(), Duration::ZERO, None);
    let lines = child.stderr.take().into_iter();
    for line in lines.flat_map(|err| BufReader::new(err).split(b'\n')) {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(log, "{line}")?;
        if let Some((_, path)) = line.split_once(CRASH_PREFIX) {
            crash = Some(path.to_owned());
        }
        if line.starts_with('#') && start.elapsed() >= next_report {
            println!("{name}: {line}");
            next_report = start.elapsed() + PROGRESS_INTERVAL;
        }
    }
    let status = child.wait()?;
    match crash {
        Some(input) => bail!(
            "an input makes it panic or hang: {input}\n  log: {}\n  to reproduce: cargo xtask fuzz \
             {name} --input {input}",
            log_path.display()
        ),
        None => ensure!(
            status.success(),
            "the fuzz target failed ({status}); log: {}",
            log_path.display()
        ),
    }
    Ok(())
}
