use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::table::{PROGRAMS, Program};

use super::FieldError;
use crate::bpf::KernelLog;

/// Logging of events in the kernel programs.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// The kernel program whose events are logged, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelLog>,
}

impl LogConfig {
    /// Returns true if no kernel program logs events.
    #[must_use]
    pub const fn is_off(&self) -> bool {
        self.kernel.is_none()
    }

    /// Returns the log filter and, if a kernel program logs events, adds a directive for the target `kernel`.
    /// A directive for this target that is already in `filter` takes precedence.
    #[must_use]
    pub fn filter(&self, filter: &str) -> String {
        match &self.kernel {
            // If there are two directives for a target, the last one takes effect.
            Some(KernelLog { program: _, level }) => format!("kernel={level},{filter}"),
            None => filter.to_owned(),
        }
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        let Some(KernelLog { program, level: _ }) = &self.kernel else {
            return Ok(());
        };
        if Program::named(program).is_some() {
            return Ok(());
        }
        let programs: Vec<_> = PROGRAMS.iter().map(|program| program.name).collect();
        let programs = programs.join(", ");
        let reason = format!("`{program}` is not a kernel program; use one of {programs}");
        Err(("log.kernel.program".to_owned(), reason))
    }
}
