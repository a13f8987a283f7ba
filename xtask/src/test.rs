//! The test tiers.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::{
    progress::{self, Outcome, Row},
    setup,
    vm::suite,
    workspace,
};

/// A tier, by the least power it needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Tier {
    /// Pure cores, beside their code.
    Unit,
    /// Kubernetes objects in, map content out.
    Golden,
    /// The tunnel from end to end over loopback.
    Tunnel,
    /// Programs at tc on packets (root).
    Packet,
    /// Real sockets through real programs (root).
    Netns,
}

impl Tier {
    const ALL: [Self; 5] = [
        Self::Unit,
        Self::Golden,
        Self::Tunnel,
        Self::Packet,
        Self::Netns,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Golden => "golden",
            Self::Tunnel => "tunnel",
            Self::Packet => "packet",
            Self::Netns => "netns",
        }
    }

    const fn needs_root(self) -> bool {
        match self {
            Self::Unit | Self::Golden | Self::Tunnel => false,
            Self::Packet | Self::Netns => true,
        }
    }
}

/// Runs one tier or all, and says what was left out.
pub(crate) fn run(tier: Option<Tier>, args: &[String]) -> Result<()> {
    let tiers = tier.map_or_else(|| Tier::ALL.to_vec(), |tier| vec![tier]);
    let (able, left_out) = split(&tiers, workspace::is_root());
    let network = able.iter().any(|tier| tier.needs_root());
    setup::ensure(setup::Scope {
        network,
        ..setup::Scope::default()
    })?;

    let mut rows: Vec<Row> = able
        .iter()
        .map(|tier| progress::part(tier.name(), || run_tier(*tier, args)))
        .collect();
    rows.extend(left_out.iter().map(|tier| Row {
        name: tier.name(),
        outcome: Outcome::LeftOut("needs root"),
        took: Duration::ZERO,
    }));
    let is_good = progress::summarise("tier", &rows);
    let is_enough = left_out.is_empty() || (tier.is_none() && !workspace::is_ci());
    if let Some(line) = left_out_line(&left_out) {
        println!("{line}");
    }
    ensure!(is_good, "a test tier failed");
    ensure!(is_enough, "a tier that had to run was left out");
    Ok(())
}

/// The tiers that can run, and those that would need root.
fn split(tiers: &[Tier], is_root: bool) -> (Vec<Tier>, Vec<Tier>) {
    tiers.iter().partition(|tier| is_root || !tier.needs_root())
}

fn left_out_line(left_out: &[Tier]) -> Option<String> {
    let names: Vec<&str> = left_out.iter().map(|tier| tier.name()).collect();
    (!names.is_empty()).then(|| format!("left out (need root): {}", names.join(", ")))
}

fn run_tier(tier: Tier, args: &[String]) -> Result<Outcome> {
    let mut command = workspace::cargo("test");
    match tier {
        Tier::Unit => {}
        Tier::Golden => {
            command.args(["--package", "tunnel-tests", "--lib", "--test", "golden"]);
        }
        Tier::Tunnel => {
            let programs = workspace::build_programs(false)?;
            command
                .args(["--package", "tunnel-tests", "--test", "tunnel"])
                .env("CULVERT_LAB_BIN", programs.lab);
        }
        Tier::Packet => {
            let programs = workspace::build_programs(false)?;
            command
                .args(["--package", "tunnel-tests", "--test", "packet"])
                .env("CULVERT_BIN", programs.culvert)
                .env("CULVERT_LAB_BIN", programs.lab);
        }
        Tier::Netns => {
            let programs = workspace::build_programs(false)?;
            command
                .args([
                    "--package",
                    "tunnel-tests",
                    "--test",
                    "lab",
                    "--test",
                    "netns",
                ])
                .env("CULVERT_BIN", programs.culvert)
                .env("CULVERT_LAB_BIN", programs.lab);
        }
    }
    command.arg("--");
    if tier == Tier::Netns {
        command.arg(suite::MARKED_TOO);
    }
    command.args(args);
    Ok(progress::visible(&mut command)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_runs_every_tier() {
        assert_eq!(split(&Tier::ALL, true), (Tier::ALL.to_vec(), Vec::new()));
        assert_eq!(left_out_line(&[]), None);
    }

    #[test]
    fn without_root_the_tiers_that_need_it_are_left_out_and_named() {
        let (able, left_out) = split(&Tier::ALL, false);

        assert_eq!(able, [Tier::Unit, Tier::Golden, Tier::Tunnel]);
        assert_eq!(
            left_out_line(&left_out).as_deref(),
            Some("left out (need root): packet, netns")
        );
    }
}
