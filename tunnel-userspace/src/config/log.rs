use serde::{Deserialize, Serialize};
use tunnel_common::table::{PROGRAMS, Program};

use super::Refused;
use crate::bpf::KernelLog;

/// Logs besides those of the daemon itself.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// The kernel program whose events are logged, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelLog>,
}

impl Log {
    /// True if no kernel program logs.
    #[must_use]
    pub const fn is_off(&self) -> bool {
        self.kernel.is_none()
    }

    /// Returns the filter extended by the level of the kernel program's events. A directive for the
    /// target `kernel` in `filter` takes precedence.
    #[must_use]
    pub fn filter(&self, filter: &str) -> String {
        match &self.kernel {
            // The last of two directives for one target counts.
            Some(KernelLog { program: _, level }) => format!("kernel={level},{filter}"),
            None => filter.to_owned(),
        }
    }

    pub(super) fn check(&self) -> Result<(), Refused> {
        let Some(KernelLog { program, level: _ }) = &self.kernel else {
            return Ok(());
        };
        if Program::named(program).is_some() {
            return Ok(());
        }
        let programs: Vec<_> = PROGRAMS.iter().map(|program| program.name).collect();
        let reason = format!("`{program}` is no program, use {}", programs.join(", "));
        Err(("log.kernel.program".to_owned(), reason))
    }
}
