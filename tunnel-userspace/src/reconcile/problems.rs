use std::{collections::BTreeMap, fmt};

use tunnel_common::reason::Reason;

use crate::plan::PortName;

/// Why a service port is not programmed, or not as it should be.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Problem {
    /// The reason, as it is counted.
    pub reason: Reason,
    /// What happened, for people.
    pub text: String,
}

/// The problems of a Service, by port.
pub(super) type Problems = BTreeMap<PortName, Problem>;

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Problem {
    /// There is no room for the backends of a plan.
    pub(super) fn no_room(reason: Reason, wanted: usize, kept: usize) -> Self {
        let mut text = format!("{} ({wanted} backends wanted", reason.meaning());
        if reason == Reason::BackendsFull && kept > 0 {
            text.push_str(&format!(
                "; open connections keep the indices of {kept} backends that are gone"
            ));
        }
        text.push(')');
        Self { reason, text }
    }
}
