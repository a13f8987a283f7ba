//! Logs the local listeners that are ignored. Any user can open and close listeners again and again, so the number of
//! log lines is limited.

use std::time::Duration;

use tracing::{info, warn};
use tunnel_common::{reason::Reason, service::FrontendKey};

/// The maximum number of lines in each interval.
const MAX_LINES: u32 = 20;
const INTERVAL: Duration = Duration::from_secs(60);

/// A change of an ignored listener.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct IgnoredListener {
    pub(super) frontend: FrontendKey,
    /// The name of the frontend's service port.
    pub(super) service: String,
    /// The id of the user; `None` if the listener is gone.
    pub(super) user: Option<u32>,
}

/// The lines that were logged in the current interval.
#[derive(Debug, Default)]
pub(super) struct ListenerLog {
    started_at: Option<Duration>,
    lines: u32,
    suppressed: u64,
}

/// The decision about a line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Line {
    /// The line is logged.
    Logged,
    /// The line is not logged, as the first one in this interval.
    FirstSuppressed,
    /// The line is not logged.
    Suppressed,
}

impl ListenerLog {
    /// Logs changes at a time of the monotonic clock.
    pub(super) fn log(&mut self, changes: &[IgnoredListener], now: Duration) {
        for IgnoredListener {
            frontend,
            service,
            user,
        } in changes
        {
            if let Some(count) = self.start_interval(now) {
                warn!(count, "changes of ignored local listeners were not logged");
            }
            match (self.admit(), user) {
                (Line::Logged, Some(user)) => {
                    let reason = Reason::ListenerIgnored.label();
                    warn!(%frontend, service, user, reason, "local listener ignored");
                }
                (Line::Logged, None) => {
                    info!(%frontend, service, "ignored local listener gone");
                }
                (Line::FirstSuppressed, _) => {
                    warn!(
                        "ignored local listeners change often; for up to a minute, their changes are only counted"
                    );
                }
                (Line::Suppressed, _) => {}
            }
        }
    }

    /// Starts a new interval if the current one is over. Returns the number of lines that were not logged, if any.
    fn start_interval(&mut self, now: Duration) -> Option<u64> {
        let is_over = |started_at| now >= started_at + INTERVAL;
        if !self.started_at.is_none_or(is_over) {
            return None;
        }
        let last = std::mem::take(self);
        self.started_at = Some(now);
        Some(last.suppressed).filter(|count| *count > 0)
    }

    fn admit(&mut self) -> Line {
        if self.lines < MAX_LINES {
            self.lines += 1;
            return Line::Logged;
        }
        self.suppressed += 1;
        if self.suppressed == 1 {
            Line::FirstSuppressed
        } else {
            Line::Suppressed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_lines_in_a_minute_is_limited_and_the_others_are_counted() {
        let mut log = ListenerLog::default();
        let (mut logged, mut counted) = (0, Vec::new());
        // Four listeners appear and disappear each second, for three minutes.
        for second in 0..180 {
            for _ in 0..8 {
                counted.extend(log.start_interval(Duration::from_secs(second)));
                logged += usize::from(log.admit() != Line::Suppressed);
            }
        }

        assert_eq!(logged, 3 * 21);
        assert_eq!(counted, [460, 460]);
    }
}
