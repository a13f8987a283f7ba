//! Measures packets of flows that last, one way to the server on another node: datagrams of 64 bytes, and the bytes of a
//! connection in single packets.

use std::{fmt, net::SocketAddr};

use anyhow::{Context as _, Result};
use serde::Serialize;
use tunnel_tests::{
    environment,
    load::stream::Report,
    pod,
    sandbox::{COMMAND_TIMEOUT, Sandbox},
    table::{Column, format_table},
};

use super::{
    CPU,
    nodes::{BenchNode, NODE, STREAM_NODE_PORT},
};
use crate::report::{Verdict, median, median_ratio, run_rounds, thousandths};

/// The translation of a row's packets.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Translation {
    None,
    EmptyPrograms,
    /// By the programs, and then by the network stack.
    Stack,
    /// By the programs, past the network stack.
    Redirect,
    Nft,
    Iptables,
}

/// A client, and where it sends packets.
pub(super) struct Row {
    variant: String,
    translation: Translation,
    /// The number of Services.
    services: u32,
    protocol: Protocol,
    client: Sandbox,
    to: SocketAddr,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Protocol {
    Udp,
    Tcp,
}

impl Protocol {
    const ALL: [Self; 2] = [Self::Udp, Self::Tcp];

    const fn label(self) -> &'static str {
        match self {
            Self::Udp => "datagrams",
            Self::Tcp => "bytes of a connection",
        }
    }
}

/// Returns the rows of a node, one for each protocol.
pub(super) fn rows(
    node: &BenchNode,
    variant: &str,
    (translation, services): (Translation, u32),
) -> [Row; 2] {
    let is_translated = !matches!(translation, Translation::None | Translation::EmptyPrograms);
    let to = if is_translated {
        SocketAddr::from((NODE, STREAM_NODE_PORT))
    } else {
        node.streams()
    };
    Protocol::ALL.map(|protocol| Row {
        variant: variant.to_owned(),
        translation,
        services,
        protocol,
        client: node.client(),
        to,
    })
}

/// A row's medians.
#[derive(Clone, Debug, Serialize)]
struct Line {
    label: String,
    protocol: Protocol,
    translation: Translation,
    services: u32,
    /// Datagrams, or bytes.
    per_second: u64,
    /// The rate in thousandths of that without translation, of the same round.
    rate_to_direct: u64,
}

/// The results.
#[derive(Serialize)]
pub(super) struct Streams {
    lines: Vec<Line>,
    #[serde(skip)]
    rounds: Vec<Vec<Report>>,
}

/// Measures all rows in each round.
pub(super) fn measure(
    rows: &[Row],
    (rounds, millis): (u32, u64),
    prefix: &[String],
) -> Result<Streams> {
    let rounds = run_rounds(rounds, rows, |row| {
        send(row, millis, prefix)
            .with_context(|| format!("{}, {}", row.variant, row.protocol.label()))
    })?;
    let line = |(at, row): (usize, &Row)| {
        let is_direct =
            |it: &Row| it.translation == Translation::None && it.protocol == row.protocol;
        let direct = rows.iter().position(is_direct).unwrap_or(at);
        Line {
            label: format!("{}, {}", row.variant, row.protocol.label()),
            protocol: row.protocol,
            translation: row.translation,
            services: row.services,
            per_second: median(rounds.iter().map(|reports| reports[at].per_second)),
            rate_to_direct: rate_ratio(&rounds, at, direct),
        }
    };
    let lines = rows.iter().enumerate().map(line).collect();
    Ok(Streams { lines, rounds })
}

fn send(row: &Row, millis: u64, prefix: &[String]) -> Result<Report> {
    let program = pod::path_to_string(&environment::culvert_lab()?)?;
    let load = ["load", "stream"].map(str::to_owned);
    let udp = (row.protocol == Protocol::Udp).then(|| "--udp".to_owned());
    let command_line = [prefix, &[program], &load, udp.as_slice()].concat();
    let output = row
        .client
        .command(&command_line)
        .option("--to", row.to)
        .option("--millis", millis)
        .cpu(CPU)
        .start()?
        .finish(COMMAND_TIMEOUT)?;
    output.parse_report()
}

/// Returns the median of the ratios of two rows' rates, in thousandths.
fn rate_ratio(rounds: &[Vec<Report>], at: usize, to: usize) -> u64 {
    median_ratio(rounds, |report| report.per_second, at, to)
}

impl Streams {
    /// Compares each row of Culvert with the iptables rules for as many Services.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let mut verdicts = Vec::new();
        for (at, own) in self.lines.iter().enumerate() {
            let limit = match (own.translation, own.protocol) {
                (Translation::Stack, Protocol::Udp) => 1200,
                (Translation::Stack, Protocol::Tcp) => 1100,
                (Translation::Redirect, Protocol::Udp) => 1500,
                (Translation::Redirect, Protocol::Tcp) => 1250,
                (
                    Translation::None
                    | Translation::EmptyPrograms
                    | Translation::Nft
                    | Translation::Iptables,
                    _,
                ) => continue,
            };
            let is_rules = |it: &Line| {
                it.translation == Translation::Iptables
                    && (it.protocol, it.services) == (own.protocol, own.services)
            };
            let Some(rules) = self.lines.iter().position(is_rules) else {
                continue;
            };
            let measured = rate_ratio(&self.rounds, at, rules);
            let (label, rules) = (&own.label, &self.lines[rules].label);
            let target = format!("{label}: at least {} of {rules}", thousandths(limit));
            verdicts.push(Verdict::new(
                target,
                thousandths(measured),
                measured >= limit,
            ));
        }
        verdicts
    }
}

impl fmt::Display for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: [Column<Line>; 3] = [
            ("", |line| line.label.clone()),
            ("per second", |line| match line.protocol {
                Protocol::Udp => line.per_second.to_string(),
                Protocol::Tcp => format!("{} MB", line.per_second / 1_000_000),
            }),
            ("to direct", |line| thousandths(line.rate_to_direct)),
        ];
        f.write_str(&format_table(&self.lines, &columns))
    }
}
