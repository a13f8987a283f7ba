//! Benchmarks, each with its targets.

use std::{
    fmt::{self, Display},
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::{
    load::race::offset,
    manifest::{Manifest, Protocol, Service},
};

pub mod api;
pub mod connect;
pub mod program;
mod rules;
pub mod tunnel;

/// The first address of the Services that a benchmark makes.
const FIRST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 97, 0, 0));

/// How many Services a file holds.
const PER_FILE: u32 = 10_000;

/// A target and whether it was met.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// What is asked for.
    pub target: String,
    /// What was measured.
    pub measured: String,
    /// Whether that meets it.
    pub met: bool,
}

impl Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            target,
            measured,
            met,
        } = self;
        write!(
            f,
            "{}  {target}: {measured}",
            if *met { "ok    " } else { "missed" }
        )
    }
}

/// Prints the verdicts, and makes those that aren't met an error if asked to.
fn judge(verdicts: &[Verdict], check: bool) -> Result<()> {
    let missed = verdicts.iter().filter(|verdict| !verdict.met).count();
    if check && missed > 0 {
        bail!("{missed} of {} targets are missed", verdicts.len());
    }
    Ok(())
}

/// Files with many Services, all leading to the same endpoints.
fn many(
    count: u32,
    protocol: Protocol,
    port: u16,
    target: u16,
    endpoints: &[IpAddr],
) -> Vec<Manifest> {
    let service = |number: u32| {
        Service::new(&format!("svc-{number}"), [offset(FIRST, number)])
            .port(protocol, port, target)
            .backends(endpoints.iter().copied())
    };
    (0..count)
        .step_by(usize::try_from(PER_FILE).unwrap_or(1))
        .map(|first| {
            let last = first.saturating_add(PER_FILE).min(count);
            let services: Vec<_> = (first..last).map(service).collect();
            Manifest::of_services(&format!("services-{first}.yaml"), &services)
        })
        .collect()
}

/// The middle of some values; of an even number of them, the lower one.
fn median<T: Copy + Ord>(values: impl IntoIterator<Item = T>) -> Option<T> {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort_unstable();
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// A sequence without pattern (xorshift64), for the order of measurements.
struct Chance(u64);

impl Chance {
    const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let limit = u64::try_from(limit).unwrap_or(1).max(1);
        usize::try_from(self.0 % limit).unwrap_or(0)
    }

    /// The numbers below `count`, shuffled.
    fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

/// A number of thousandths, as a decimal.
fn thousandths(value: u64) -> String {
    format!("{}.{:03}", value / 1000, value % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_services_lie_in_few_files() {
        let files = many(
            25_000,
            Protocol::Tcp,
            80,
            9000,
            &[IpAddr::V4(Ipv4Addr::LOCALHOST)],
        );

        assert_eq!(files.len(), 3);
        assert_eq!(files[2].text.matches("kind: Service\n").count(), 5_000);
        assert!(files[2].text.contains("10.97.97.167"));
    }

    #[test]
    fn the_median_is_a_value_that_occurred() {
        assert_eq!(median([3, 1, 2]), Some(2));
        assert_eq!(median([4, 1, 2, 3]), Some(2));
        assert_eq!(median::<u64>([]), None);
    }
}
