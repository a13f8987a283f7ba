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
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// What is to be taken away once every Service has what it wants.
    pub(super) leftovers: Vec<(PortName, Diff)>,
    pub(super) problems: BTreeMap<PortName, Problem>,
}

impl Changes {
    pub(super) fn problem(&mut self, name: &PortName, reason: Reason, text: String) {
        self.problems.insert(name.clone(), Problem { reason, text });
    }

    /// Notes that there is no room for the backends of a plan.
    pub(super) fn refusal(&mut self, name: &PortName, reason: Reason, wanted: usize, kept: usize) {
        let mut text = format!("{} ({wanted} backends wanted", reason.meaning());
        if reason == Reason::BackendsFull && kept > 0 {
            text.push_str(&format!(
                "; open connections keep the indices of {kept} backends that are gone"
            ));
        }
        text.push(')');
        self.problem(name, reason, text);
    }
}

pub(super) fn describe(refused: &Refused) -> String {
    match refused {
        Refused::Full(_) => refused.to_string(),
        Refused::Write(error) => format!("{refused}: {error}: {}", error.source),
    }
}
