//! The reports of load clients.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Failure, Success, nanoseconds};

/// The number of times an event occurred, and the times of its first and last occurrences, relative to the
/// start of the load.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Occurrences {
    pub count: u64,
    pub first_ms: u64,
    pub last_ms: u64,
}

impl Occurrences {
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

/// The distribution of the time that one kind of call takes.
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

/// Returns a percentile of the sorted values, using the nearest-rank method, or 0 if there are no values.
#[must_use]
pub fn percentile(sorted: &[u64], hundredths: usize) -> u64 {
    let index = (sorted.len() * hundredths).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or(0)
}

/// The result of a load.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// The start time, in milliseconds since 1970.
    pub began_ms: u64,
    pub took_ms: u64,
    pub attempts: u64,
    pub answered: u64,
    /// The number of attempts that were answered but whose peer wasn't the dialled address.
    pub other_peer: u64,
    /// The failed attempts, by error and step.
    pub failures: BTreeMap<String, Occurrences>,
    /// The answered attempts, by the name of the server.
    pub servers: BTreeMap<String, Occurrences>,
    pub connect: Latency,
}

impl Report {
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failures
            .values()
            .map(|occurrences| occurrences.count)
            .sum()
    }
}

/// The results of one or more workers.
#[derive(Debug, Default)]
pub(super) struct ReportBuilder {
    pub(super) report: Report,
    times: Vec<u64>,
}

impl ReportBuilder {
    pub(super) fn record(&mut self, ms: u64, outcome: Result<Success, Failure>) {
        match outcome {
            Ok(Success {
                server,
                connect,
                is_peer_dialled,
            }) => {
                self.times.push(nanoseconds(connect));
                self.report.other_peer += u64::from(!is_peer_dialled);
                add_occurrences(&mut self.report.servers, server, Occurrences::at(ms));
            }
            Err(failed) => add_occurrences(
                &mut self.report.failures,
                failed.label(),
                Occurrences::at(ms),
            ),
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        let Self { report, times } = other;
        self.report.attempts += report.attempts;
        self.report.other_peer += report.other_peer;
        self.times.extend(times);
        for (key, occurrences) in report.failures {
            add_occurrences(&mut self.report.failures, key, occurrences);
        }
        for (key, occurrences) in report.servers {
            add_occurrences(&mut self.report.servers, key, occurrences);
        }
    }

    /// Builds the report of a load with the given start time and duration.
    pub(super) fn build(self, began_ms: u64, took_ms: u64) -> Report {
        Report {
            began_ms,
            took_ms,
            answered: self
                .report
                .servers
                .values()
                .map(|occurrences| occurrences.count)
                .sum(),
            connect: Latency::of(self.times),
            ..self.report
        }
    }
}

fn add_occurrences(
    counts: &mut BTreeMap<String, Occurrences>,
    key: String,
    occurrences: Occurrences,
) {
    counts
        .entry(key)
        .and_modify(|it| it.merge(occurrences))
        .or_insert(occurrences);
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
