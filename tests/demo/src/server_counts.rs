//! Compares clients' reports with servers' records.

use std::collections::BTreeMap;

use anyhow::Result;
use tunnel_tests::{load::Report, pod::Server, server::Counts};

/// The counts of all servers at the start of a phase of the demo.
#[derive(Debug)]
pub(crate) struct ServerCounts {
    before: BTreeMap<String, Counts>,
}

impl ServerCounts {
    /// Reads the current counts from the servers.
    pub(crate) fn read(servers: &[Server]) -> Result<Self> {
        Ok(Self {
            before: read_counts(servers)?,
        })
    }

    /// Returns how many replies were recorded since the start of the phase if the clients and servers agree;
    /// if they don't, returns an error that describes the difference.
    pub(crate) fn compare(
        &self,
        servers: &[Server],
        reports: &[(String, Report)],
    ) -> Result<Result<u64, String>> {
        let now = read_counts(servers)?;
        Ok(difference(&self.before, &now, reports))
    }
}

fn read_counts(servers: &[Server]) -> Result<BTreeMap<String, Counts>> {
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
    use tunnel_tests::load::Occurrences;

    use super::*;

    fn server_counts(answered: u64, foreign: u64) -> BTreeMap<String, Counts> {
        let counts = Counts {
            accepted: answered,
            answered,
            foreign,
        };
        BTreeMap::from([("a".to_owned(), counts)])
    }

    fn client_report(count: u64) -> (String, Report) {
        let seen = Occurrences {
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
    fn equal_records_since_the_start_of_a_phase_are_counted_and_different_ones_are_a_fault() {
        let reports = [client_report(3), client_report(2)];
        let compare = |now| difference(&server_counts(10, 1), &now, &reports);

        assert_eq!(compare(server_counts(15, 1)), Ok(5));
        let by_one_side = compare(server_counts(16, 1)).unwrap_err();
        let fault = "clients recorded {\"a\": 5}, servers {\"a\": 6}";
        assert_eq!(by_one_side, fault);
        let of_another = compare(server_counts(15, 2)).unwrap_err();
        let fault = "a got 1 requests that were meant for another Service";
        assert_eq!(of_another, fault);
    }
}
