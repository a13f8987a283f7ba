//! Waiting for conditions: no test sleeps.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::clock::{self, Instant};

/// How long to leave between two looks: short at first, since most conditions are nearly true.
const LOOKS: [Duration; 3] = [
    Duration::from_micros(200),
    Duration::from_millis(1),
    Duration::from_millis(5),
];

/// How many looks are made at each of the distances in [`LOOKS`] before the next one.
const LOOKS_EACH: usize = 20;

/// Waits until `condition` holds.
///
/// # Errors
///
/// When it still doesn't hold after `within`.
pub fn until(within: Duration, mut condition: impl FnMut() -> bool) -> Result<()> {
    some(within, || condition().then_some(()))
}

/// Waits until `look` finds something, and returns it.
///
/// # Errors
///
/// When it has found nothing after `within`.
pub fn some<T>(within: Duration, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let start = Instant::now();
    let mut looks = 0;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if start.elapsed() >= within {
            bail!("still waiting after {} ms", within.as_millis());
        }
        clock::pause(LOOKS[(looks / LOOKS_EACH).min(LOOKS.len() - 1)]);
        looks += 1;
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
