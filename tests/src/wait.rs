//! Waits for conditions, so that tests don't need to sleep. Time limits are given for fast machines;
//! [`LoadScale`] extends them on slow ones.

use std::{fmt::Debug, time::Duration};

use anyhow::{Result, anyhow, bail};

use crate::{
    clock::{self, Instant},
    load_scale::LoadScale,
};

/// The shortest and the longest interval between two checks.
const INTERVALS: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(25)];

/// Returns the interval until the next check. It grows with the time already waited, since each check slows
/// down the observed process.
fn next_interval(waited: Duration) -> Duration {
    let [shortest, longest] = INTERVALS;
    (waited / 8).clamp(shortest, longest)
}

/// Waits until `condition` returns true.
pub fn until(time_limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    until_some(time_limit, || condition().then_some(()))
}

/// Waits until `condition` returns true. Always checks it at the shortest interval, for conditions that are
/// true only briefly.
pub fn until_briefly(time_limit: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    poll(time_limit, |_| INTERVALS[0], || condition().then_some(()))
}

/// Waits until `check` returns a value, and returns that value.
pub fn until_some<T>(time_limit: Duration, check: impl FnMut() -> Option<T>) -> Result<T> {
    poll(time_limit, next_interval, check)
}

/// Waits until a process is ready. Returns an error if the process exits first.
pub fn until_ready<T: Debug>(
    time_limit: Duration,
    mut ended: impl FnMut() -> Result<Option<T>>,
    mut is_ready: impl FnMut() -> bool,
) -> Result<()> {
    until_some(time_limit, || match ended() {
        Ok(None) => is_ready().then_some(Ok(())),
        Ok(Some(how)) => Some(Err(anyhow!("the process has ended: {how:?}"))),
        Err(error) => Some(Err(error)),
    })?
}

fn poll<T>(
    time_limit: Duration,
    pause: impl Fn(Duration) -> Duration,
    mut check: impl FnMut() -> Option<T>,
) -> Result<T> {
    let time_limit = LoadScale::from_environment().timeout(time_limit);
    let start = Instant::now();
    loop {
        if let Some(found) = check() {
            return Ok(found);
        }
        if start.elapsed() >= time_limit {
            bail!("still waiting after {} ms", time_limit.as_millis());
        }
        clock::pause(pause(start.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_when_the_condition_holds() {
        let mut checks = 0;

        let found = until_some(Duration::from_secs(5), || {
            checks += 1;
            (checks == 3).then_some("there")
        });

        assert_eq!(found.unwrap(), "there");
        assert_eq!(checks, 3);
    }

    #[test]
    fn a_condition_that_never_holds_ends_with_an_error() {
        let error = until(Duration::from_millis(3), || false).unwrap_err();

        assert_eq!(error.to_string(), "still waiting after 3 ms");
    }
}
