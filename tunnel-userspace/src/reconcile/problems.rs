use std::{collections::BTreeMap, fmt};

use tunnel_common::reason::Reason;

use super::{diff::Diff, order::Refused};
use crate::plan::PortName;

/// Why a service port is not programmed, or not as it should be.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Problem {
    /// The reason, as it is counted.
    pub reason: Reason,
    /// What happened, for people.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What came of one Service in a pass.
#[derive(Default)]
pub(super) struct Changes {
    /// What is to be taken away once every Service has what it wants.
    pub(super) leftovers: Vec<(PortName, Diff)>,
    pub(super) problems: BTreeMap<PortName, Problem>,
}

impl Changes {
    pub(super) fn problem(&mut self, name: &PortName, reason: Reason, text: String) {
        self.problems.insert(name.clone(), Problem { reason, text });
    }

    pub(super) fn refusal(&mut self, name: &PortName, reason: Reason, backends: usize) {
        self.problem(
            name,
            reason,
            format!("{} ({backends} backends wanted)", reason.meaning()),
        );
    }
}

pub(super) fn describe(refused: &Refused) -> String {
    match refused {
        Refused::Full(_) => refused.to_string(),
        Refused::Write(error) => format!("{refused}: {error}: {}", error.source),
    }
}
