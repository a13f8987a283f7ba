//! Compares the reports of clients with the records of servers.

use std::collections::BTreeMap;

use anyhow::Result;
use tunnel_tests::{load::Report, pod::Server, serve::Counts};

/// The counts of all servers at the start of a phase.
#[derive(Debug)]
pub(crate) struct Tally {
    before: BTreeMap<String, Counts>,
}

impl Tally {
    /// Reads the counts from the servers.
    pub(crate) fn begin(servers: &[Server]) -> Result<Self> {
        Ok(Self {
            before: counts(servers)?,
        })
    }

    /// Returns the number of answers since then, if clients and servers recorded the same; else an error that
    /// names the difference.
    pub(crate) fn compare(
        &self,
        servers: &[Server],
        reports: &[(String, Report)],
    ) -> Result<Result<u64, String>> {
        let now = counts(servers)?;
        Ok(difference(&self.before, &now, reports))
    }
}

fn counts(servers: &[Server]) -> Result<BTreeMap<String, Counts>> {
    let records = servers.iter().map(Server::record);
    records
        .map(|record| record.map(|it| (it.name.clone(), it.total())))
        .collect()
}

fn difference(
    before: &BTreeMap<String, Counts>,
    now: &BTreeMap<String, Counts>,
    reports: &[(String, Report)],
) -> Result<u64, String> {
    let mut by_clients: BTreeMap<String, u64> = BTreeMap::new();
    for (server, seen) in reports.iter().flat_map(|(_, report)| &report.servers) {
        *by_clients.entry(server.clone()).or_default() += seen.count;
    }
    let mut by_servers: BTreeMap<String, u64> = BTreeMap::new();
    for (server, counts) in now {
        let earlier = before.get(server).copied().unwrap_or_default();
        let foreign = counts.foreign - earlier.foreign;
        if foreign > 0 {
            return Err(format!(
                "{server} got {foreign} requests that were meant for another Service"
            ));
        }
        if counts.answered > earlier.answered {
            by_servers.insert(server.clone(), counts.answered - earlier.answered);
        }
    }
    if by_clients == by_servers {
        Ok(by_servers.values().sum())
    } else {
        Err(format!(
            "clients recorded {by_clients:?}, servers {by_servers:?}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use tunnel_tests::load::Seen;

    use super::*;

    fn served(answered: u64, foreign: u64) -> BTreeMap<String, Counts> {
        let counts = Counts {
            accepted: answered,
            answered,
            foreign,
        };
        BTreeMap::from([("a".to_owned(), counts)])
    }

    fn reported(count: u64) -> (String, Report) {
        let seen = Seen {
            count,
            first_ms: 0,
            last_ms: 0,
        };
        let servers = BTreeMap::from([("a".to_owned(), seen)]);
        let report = Report {
            servers,
            ..Report::default()
        };
        ("load".to_owned(), report)
    }

    #[test]
    fn what_both_sides_recorded_since_the_phase_began_is_counted_and_the_rest_a_fault() {
        let reports = [reported(3), reported(2)];
        let compare = |now| difference(&served(10, 1), &now, &reports);

        assert_eq!(compare(served(15, 1)), Ok(5));
        let by_one_side = compare(served(16, 1)).unwrap_err();
        let fault = "clients recorded {\"a\": 5}, servers {\"a\": 6}";
        assert_eq!(by_one_side, fault);
        let of_another = compare(served(15, 2)).unwrap_err();
        let fault = "a got 1 requests that were meant for another Service";
        assert_eq!(of_another, fault);
    }
}
