//! Parses and formats durations as they are written in the config: `90s`, `10m`, `1h`, `30d`.

use std::{fmt, time::Duration};

use serde::{
    Deserializer, Serializer,
    de::{Error, Visitor},
};

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(source: D) -> Result<Duration, D::Error> {
    source.deserialize_str(DurationVisitor)
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a duration with a unit, such as 30s")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        parse(text).ok_or_else(|| {
            E::custom(format!(
                "`{text}` is not a duration; write a number and a unit (ms, s, m, h or d), as in 30s"
            ))
        })
    }
}

pub(crate) fn serialize<S: Serializer>(value: &Duration, target: S) -> Result<S::Ok, S::Error> {
    target.collect_str(&DisplayDuration(*value))
}

/// Displays a duration in seconds, or in milliseconds if it is not a whole number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) struct DisplayDuration(pub(crate) Duration);

impl fmt::Display for DisplayDuration {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.subsec_millis() {
            0 => write!(to, "{}s", self.0.as_secs()),
            _ => write!(to, "{}ms", self.0.as_millis()),
        }
    }
}

/// The maximum of a timeout that a 32-bit number of seconds or ticks stands for.
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 86_400);

/// Checks that a timeout is a number of seconds, at least `min` and at most 30 days. Returns the reason if it is not.
pub(crate) fn check_seconds(timeout: Duration, min: Duration) -> Result<(), String> {
    if (min..=MAX_TIMEOUT).contains(&timeout) && timeout.subsec_nanos() == 0 {
        return Ok(());
    }
    Err(format!(
        "must be a number of seconds from {} to {}, but is {}",
        DisplayDuration(min),
        DisplayDuration(MAX_TIMEOUT),
        DisplayDuration(timeout)
    ))
}

fn parse(text: &str) -> Option<Duration> {
    let unit = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit);
    let number: u64 = number.parse().ok()?;
    let seconds = match unit {
        "ms" => return Some(Duration::from_millis(number)),
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    number.checked_mul(seconds).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_written_as_it_is_read() {
        for text in ["3600s", "250ms", "60001ms", "0s"] {
            let duration = parse(text).expect("a duration");
            let written = serialize(&duration, serde_json::value::Serializer);
            assert_eq!(written.expect("text"), text);
        }
    }

    #[test]
    fn a_duration_is_a_number_and_a_unit() {
        assert_eq!(parse("1h"), Some(Duration::from_secs(3600)));
        assert_eq!(parse("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(parse("10"), None);
        assert_eq!(parse("s"), None);
        assert_eq!(parse("99999999999999999999h"), None);
    }
}
