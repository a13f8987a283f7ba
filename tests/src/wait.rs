//! Waits for conditions, so that no test needs to sleep. Time limits are given for fast machines, and
//! extended on slow ones by [`Scale`].

use std::{fmt::Debug, time::Duration};

use anyhow::{Result, anyhow, bail};

use crate::{
    clock::{self, Instant},
    scale::Scale,
};

/// The shortest and the longest interval between two checks.
const LOOKS: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(25)];

/// Returns the pause before the next check. It grows with the time waited so far, since each check slows
/// down the observed process.
fn next_look(waited: Duration) -> Duration {
    let [shortest, longest] = LOOKS;
    (waited / 8).clamp(shortest, longest)
}

/// Waits until `condition` holds.
pub fn until(within: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    some(within, || condition().then_some(()))
}

/// Waits until `condition` holds, with checks at the shortest interval, for conditions that hold only
/// briefly.
pub fn until_a_moment(within: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    looking(within, |_| LOOKS[0], || condition().then_some(()))
}

/// Waits until `look` returns a value; returns the value.
pub fn some<T>(within: Duration, look: impl FnMut() -> Option<T>) -> Result<T> {
    looking(within, next_look, look)
}

/// Waits until a process is ready; fails if the process ends before that.
pub(crate) fn ready<T: Debug>(
    within: Duration,
    mut ended: impl FnMut() -> Result<Option<T>>,
    mut is_ready: impl FnMut() -> bool,
) -> Result<()> {
    some(within, || match ended() {
        Ok(None) => is_ready().then_some(Ok(())),
        Ok(Some(how)) => Some(Err(anyhow!("the process has ended: {how:?}"))),
        Err(error) => Some(Err(error)),
    })?
}

fn looking<T>(
    within: Duration,
    pause: impl Fn(Duration) -> Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Result<T> {
    let within = Scale::from_environment().patience(within);
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if start.elapsed() >= within {
            bail!("still waiting after {} ms", within.as_millis());
        }
        clock::pause(pause(start.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_with_the_condition() {
        let mut looks = 0;

        let found = some(Duration::from_secs(5), || {
            looks += 1;
            (looks == 3).then_some("there")
        });

        assert_eq!(found.unwrap(), "there");
        assert_eq!(looks, 3);
    }

    #[test]
    fn waiting_in_vain_ends_with_an_error() {
        let error = until(Duration::from_millis(3), || false).unwrap_err();

        assert_eq!(error.to_string(), "still waiting after 3 ms");
    }
}
