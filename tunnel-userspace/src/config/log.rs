use serde::{Deserialize, Serialize};
use tunnel_common::table::{PROGRAMS, Program};

/// What is logged besides what the daemon itself has to say.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// The kernel program whose events are logged, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelLog>,
}

impl Log {
    /// Whether nothing is.
    #[must_use]
    pub const fn is_off(&self) -> bool {
        self.kernel.is_none()
    }

    /// A filter with room for what is asked for here. What the filter itself says of the target
    /// `kernel` comes first.
    #[must_use]
    pub fn filter(&self, filter: &str) -> String {
        match &self.kernel {
            // Of two words on one target, the last counts.
            Some(KernelLog { program: _, level }) => format!("kernel={},{filter}", level.word()),
            None => filter.to_owned(),
        }
    }

    pub(super) fn check(&self) -> Result<(), (String, String)> {
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

/// A kernel program whose events are logged.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KernelLog {
    /// The program, named as its hook.
    pub program: String,
    /// Up to which level.
    #[serde(default)]
    pub level: Level,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// What failed.
    Error,
    /// What may fail.
    Warn,
    /// What is new.
    Info,
    /// What was done.
    #[default]
    Debug,
    /// What was left alone too.
    Trace,
}

impl Level {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
