//! The rows of `culvert status` and `culvert services NAME`; `docs/status.md` describes each of them.

use std::{collections::BTreeMap, fmt};

use tunnel_common::table::MapSize;

/// Declares the enum `Row`, with a label for each row.
macro_rules! rows {
    ($($name:ident = $label:literal,)+) => {
        /// A row in the output of `culvert status` or `culvert services NAME`.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub(super) enum Row {
            $($name,)+
        }

        impl Row {
            /// All rows.
            #[cfg(test)]
            pub(super) const ALL: &[Self] = &[$(Self::$name,)+];

            pub(super) const fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }
        }
    };
}

rows! {
    Agents = "agents",
    Algorithm = "algorithm",
    AllowedTargets = "allowed targets",
    ApiServer = "API server",
    Backends = "backends",
    Certificate = "certificate",
    Cgroup = "cgroup",
    ClientIdentity = "client identity",
    Clock = "clock",
    Connections = "connections",
    DenyList = "deny list",
    Error = "error",
    Flows = "flows",
    Frontends = "frontends",
    GuardedUplinks = "guarded uplinks",
    HealthChecks = "health checks",
    Ignored = "ignored",
    KernelLog = "kernel log",
    LastWrite = "last write",
    OpenConnections = "open connections",
    Packets = "packets",
    Pins = "pins",
    PodLinks = "pod links",
    Process = "process",
    Programs = "programs",
    Reasons = "reasons",
    RefusalMethod = "refusal method",
    Refused = "refused",
    RefusedLinks = "refused links",
    Rejected = "rejected",
    Route = "route",
    Services = "services",
    SessionAffinity = "session affinity",
    Slots = "slots",
    Sockets = "sockets",
    SourceRanges = "source ranges",
    Stale = "stale",
    StaleSockets = "stale sockets",
    Status = "status",
    Steering = "steering",
    TerminatedSockets = "terminated sockets",
    TunnelError = "tunnel error",
    Warning = "warning",
}

impl Row {
    /// Returns the row that shows how many of a map's entries are in use, or `None` if the status does not
    /// show this.
    pub(super) const fn of_size(size: MapSize) -> Option<Self> {
        match size {
            MapSize::Frontends => Some(Self::Frontends),
            MapSize::Slots => Some(Self::Slots),
            MapSize::Backends => Some(Self::Backends),
            MapSize::SourceRanges => Some(Self::SourceRanges),
            MapSize::Steering
            | MapSize::Affinity
            | MapSize::SharedTranslations
            | MapSize::Flows
            | MapSize::Fragments => None,
        }
    }
}

/// A headline, followed by rows that each have a label and a value.
pub(super) struct Rows(String);

impl Rows {
    pub(super) const fn with_headline(headline: String) -> Self {
        Self(headline)
    }

    pub(super) fn add(&mut self, row: Row, value: impl fmt::Display) {
        self.add_line(row.label(), value);
    }

    /// Adds another line to the last row.
    pub(super) fn continue_with(&mut self, value: impl fmt::Display) {
        self.add_line("", value);
    }

    /// Adds one row for each value, all with the same label.
    pub(super) fn add_each<V: fmt::Display>(
        &mut self,
        row: Row,
        values: impl IntoIterator<Item = V>,
    ) {
        for value in values {
            self.add(row, value);
        }
    }

    /// Adds one row with all counts that are not zero, if there are any.
    pub(super) fn add_counts(&mut self, row: Row, counts: &BTreeMap<String, u64>) {
        let counted = counts.iter().filter(|(_, count)| **count > 0);
        let counted: Vec<_> = counted
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        if !counted.is_empty() {
            self.add(row, counted.join(", "));
        }
    }

    fn add_line(&mut self, label: &str, value: impl fmt::Display) {
        self.0.push_str(&format!("\n  {label:<20}{value}"));
    }
}

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod documented {
    //! Checks that `docs/status.md` lists exactly the rows and columns that the command line prints.

    use std::collections::BTreeSet;

    use super::{
        super::{agent_status, flows, nodes, service_tables},
        Row,
    };

    const PAGE: &str = include_str!("../../../docs/status.md");

    /// Returns the names in the first column of every table whose first header cell is `head`.
    fn documented(head: &str) -> BTreeSet<&'static str> {
        let head = format!("| {head} |");
        let mut is_in_table = false;
        let mut names = BTreeSet::new();
        for line in PAGE.lines() {
            if line.starts_with(&head) {
                is_in_table = true;
            } else if !line.starts_with('|') {
                is_in_table = false;
            } else if is_in_table {
                let cell = line.trim_start_matches('|').split('|').next();
                let quoted = cell.unwrap_or_default().split('`');
                names.extend(quoted.skip(1).step_by(2));
            }
        }
        names
    }

    #[test]
    fn the_page_on_the_status_has_each_row_and_no_other() {
        let rows = Row::ALL.iter().map(|row| row.label()).collect();
        assert_eq!(documented("row"), rows);
    }

    #[test]
    fn the_page_on_the_status_has_each_column_and_no_other() {
        let columns = [
            &agent_status::COLUMNS[..],
            &nodes::COLUMNS,
            &flows::COLUMNS,
            &nodes::CLIENT_COLUMNS,
            &service_tables::COLUMNS,
            &service_tables::FRONTEND_COLUMNS,
            &service_tables::ENDPOINT_COLUMNS,
            &service_tables::BACKEND_COLUMNS,
        ];
        let columns = columns.concat().into_iter().collect();
        assert_eq!(documented("column"), columns);
    }
}
