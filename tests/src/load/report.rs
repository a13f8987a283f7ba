//! The reports of load clients.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Answered, Failed, nanoseconds};

/// The number of occurrences of an event, and the times of the first and the last since the start of the
/// load.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Seen {
    pub count: u64,
    pub first_ms: u64,
    pub last_ms: u64,
}

impl Seen {
    const fn at(ms: u64) -> Self {
        Self {
            count: 1,
            first_ms: ms,
            last_ms: ms,
        }
    }

    fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.first_ms = self.first_ms.min(other.first_ms);
        self.last_ms = self.last_ms.max(other.last_ms);
    }
}

/// The durations of one kind of call.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Latency {
    pub count: u64,
    /// The median.
    pub p50_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
    pub max_ns: u64,
}

impl Latency {
    pub(crate) fn of(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        Self {
            count: u64::try_from(times.len()).unwrap_or(u64::MAX),
            p50_ns: percentile(&times, 50),
            p99_ns: percentile(&times, 99),
            max_ns: times.last().copied().unwrap_or(0),
        }
    }
}

/// Returns a percentile of sorted values by the nearest-rank method; 0 without values.
#[must_use]
pub fn percentile(sorted: &[u64], hundredths: usize) -> u64 {
    let place = (sorted.len() * hundredths).div_ceil(100).saturating_sub(1);
    sorted.get(place).copied().unwrap_or(0)
}

/// The result of a load.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// The start time in milliseconds since 1970.
    pub began_ms: u64,
    pub took_ms: u64,
    pub attempts: u64,
    pub answered: u64,
    /// The number of answered attempts whose peer differs from the dialled address.
    pub other_peer: u64,
    /// The failures, by error and step.
    pub failures: BTreeMap<String, Seen>,
    /// The responses, by server.
    pub servers: BTreeMap<String, Seen>,
    pub connect: Latency,
}

impl Report {
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failures.values().map(|seen| seen.count).sum()
    }
}

/// The results of one worker, or of several.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) report: Report,
    times: Vec<u64>,
}

impl Tally {
    pub(super) fn note(&mut self, ms: u64, outcome: Result<Answered, Failed>) {
        match outcome {
            Ok(Answered {
                server,
                connect,
                peer_as_dialled,
            }) => {
                self.times.push(nanoseconds(connect));
                self.report.other_peer += u64::from(!peer_as_dialled);
                note(&mut self.report.servers, server, Seen::at(ms));
            }
            Err(failed) => note(&mut self.report.failures, failed.label(), Seen::at(ms)),
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        let Self { report, times } = other;
        self.report.attempts += report.attempts;
        self.report.other_peer += report.other_peer;
        self.times.extend(times);
        for (key, seen) in report.failures {
            note(&mut self.report.failures, key, seen);
        }
        for (key, seen) in report.servers {
            note(&mut self.report.servers, key, seen);
        }
    }

    /// Builds the report of a load, given its start and duration.
    pub(super) fn report(self, began_ms: u64, took_ms: u64) -> Report {
        Report {
            began_ms,
            took_ms,
            answered: self.report.servers.values().map(|seen| seen.count).sum(),
            connect: Latency::of(self.times),
            ..self.report
        }
    }
}

fn note(counts: &mut BTreeMap<String, Seen>, key: String, seen: Seen) {
    counts
        .entry(key)
        .and_modify(|it| it.merge(seen))
        .or_insert(seen);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let times: Vec<u64> = (1..=200).collect();

        assert_eq!(percentile(&times, 50), 100);
        assert_eq!(percentile(&times, 99), 198);
        assert_eq!(percentile(&[7], 99), 7);
        assert_eq!(percentile(&[], 99), 0);
    }
}
