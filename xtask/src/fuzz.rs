//! The fuzz targets (`tests/fuzz`): built with coverage counters by the stable compiler, and driven by
//! libFuzzer.

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

/// An explicit target, so that the flags apply to it alone, not to build scripts and macros, too.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Counts each branch and reports comparisons to libFuzzer (LLVM's SanitizerCoverage).
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                     -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
                     --cfg=fuzzing";

/// The time after which one input counts as a hang, in seconds.
const HANG: u32 = 10;

/// The interval of progress reports.
const TOLD: Duration = Duration::from_secs(10);

/// The text before the path of an input that ended a target.
const WRITTEN: &str = "Test unit written to ";

/// The parsers to fuzz, and the duration.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Only this parser.
    #[arg(value_enum)]
    parser: Option<Parser>,
    /// The duration for each parser, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Run the parser on this input, once.
    #[arg(long, value_name = "FILE", requires = "parser")]
    input: Option<PathBuf>,
}

impl Options {
    /// All parsers, with the default duration.
    pub(crate) const ALL: Self = Self {
        parser: None,
        seconds: 60,
        input: None,
    };
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Parser {
    /// Documents of manifests.
    Manifests,
    /// kube-proxy's config.
    #[value(name = "kube_proxy")]
    KubeProxy,
    /// The kernel's answers about sockets.
    #[value(name = "sock_diag")]
    SockDiag,
    /// The kernel's description of its types.
    Btf,
    /// Heads of the tunnel's streams.
    Heads,
}

impl Parser {
    const ALL: [Self; 5] = [
        Self::Manifests,
        Self::KubeProxy,
        Self::SockDiag,
        Self::Btf,
        Self::Heads,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Manifests => "manifests",
            Self::KubeProxy => "kube_proxy",
            Self::SockDiag => "sock_diag",
            Self::Btf => "btf",
            Self::Heads => "heads",
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
            progress::visible(command.arg(input))?,
            "{} doesn't take {}",
            parser.name(),
            input.display()
        );
        return Ok(());
    }
    let parsers = options
        .parser
        .map_or_else(|| Parser::ALL.to_vec(), |it| vec![it]);
    let run = |parser: &Parser| {
        progress::part(parser.name(), || {
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

/// Returns the folder of all output.
fn folder() -> PathBuf {
    workspace::root().join("target/fuzz")
}

/// Builds all targets; returns their folder.
fn build() -> Result<PathBuf> {
    let mut command = workspace::cargo("build");
    command
        .args(["--package", "tunnel-fuzz", "--bins", "--features", "engine"])
        .args(["--profile", "fuzz", "--target", TARGET, "--target-dir"])
        .arg(folder())
        .env("RUSTFLAGS", FLAGS)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    ensure!(progress::visible(&mut command)?, "cargo build failed");
    Ok(folder().join(TARGET).join("fuzz"))
}

/// Runs a target on the inputs of earlier runs and on the seeds. Its output goes to a file.
fn fuzz(parser: Parser, programs: &Path, seconds: u32) -> Result<()> {
    let name = parser.name();
    let (found, crashes) = (folder().join("found").join(name), folder().join("crashes"));
    for folder in [&found, &crashes] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let log = folder().join(format!("{name}.log"));
    let mut written = File::create(&log)?;
    let mut child = Command::new(programs.join(name))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={HANG}"))
        .args(["-use_value_profile=1", "-print_final_stats=1"])
        .arg(format!("-artifact_prefix={}/{name}-", crashes.display()))
        .arg(&found)
        .arg(workspace::root().join("tests/fuzz/corpus").join(name))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    let (start, mut told, mut crash) = (Clock::start(), Duration::ZERO, None);
    let lines = child.stderr.take().into_iter();
    for line in lines.flat_map(|err| BufReader::new(err).split(b'\n')) {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(written, "{line}")?;
        if let Some((_, path)) = line.split_once(WRITTEN) {
            crash = Some(path.to_owned());
        }
        if line.starts_with('#') && start.elapsed() >= told {
            println!("{name}: {line}");
            told = start.elapsed() + TOLD;
        }
    }
    let status = child.wait()?;
    match crash {
        Some(input) => bail!(
            "an input ends it: {input}\n  its words: {}\n  again: cargo xtask fuzz {name} --input {input}",
            log.display()
        ),
        None => ensure!(
            status.success(),
            "it ended with {status}; its words: {}",
            log.display()
        ),
    }
    Ok(())
}
