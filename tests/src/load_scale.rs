//! Scales down loads, and extends time limits, on slow machines.

use std::time::Duration;

use crate::environment;

/// The size and duration of loads, relative to the values written in the tests. On slow virtual machines, the
/// factor is less than 1 (for example, `CULVERT_SCALE=0.05`). `CULVERT_LASTING` sets a different factor for
/// durations.
#[derive(Clone, Copy, Debug)]
pub struct LoadScale {
    /// The factor for counts and rates, in thousandths, so that no floating-point arithmetic is needed.
    count_thousandths: u32,
    /// The factor for durations, in thousandths.
    duration_thousandths: u32,
}

impl LoadScale {
    /// Uses the values exactly as written in the tests.
    pub const FULL: Self = Self {
        count_thousandths: 1000,
        duration_thousandths: 1000,
    };

    /// Reads the factors from the environment. Returns [`Self::FULL`] if they are missing or invalid.
    #[must_use]
    pub fn from_environment() -> Self {
        let scale = environment::load_factor().and_then(|text| Self::parse(&text));
        let scale = scale.unwrap_or(Self::FULL);
        let duration = environment::duration_factor().and_then(|text| Self::parse(&text));
        Self {
            duration_thousandths: duration.unwrap_or(scale).count_thousandths,
            ..scale
        }
    }

    /// Parses a decimal factor, which must be greater than 0.
    fn parse(text: &str) -> Option<Self> {
        let factor = Duration::try_from_secs_f64(text.trim().parse().ok()?).ok()?;
        let thousandths = u32::try_from(factor.as_millis()).ok()?;
        (thousandths > 0).then_some(Self {
            count_thousandths: thousandths,
            duration_thousandths: thousandths,
        })
    }

    /// Scales a count or a rate, but returns at least 1.
    #[must_use]
    pub fn count(self, full: u32) -> u32 {
        let scaled = u64::from(full) * u64::from(self.count_thousandths) / 1000;
        u32::try_from(scaled).unwrap_or(u32::MAX).max(1)
    }

    /// Scales the duration of a load.
    #[must_use]
    pub fn duration(self, full: Duration) -> Duration {
        full * self.duration_thousandths / 1000
    }

    /// Scales a time limit up on slow machines, by a factor of at most 20. It is never scaled down.
    #[must_use]
    pub fn timeout(self, full: Duration) -> Duration {
        full * 1000.max(1_000_000 / self.count_thousandths).min(20_000) / 1000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_twentieth_shortens_loads_and_extends_time_limits() {
        let scale = LoadScale::parse("0.05").unwrap();

        assert_eq!(scale.count(500), 25);
        assert_eq!(scale.count(3), 1);
        assert_eq!(
            scale.duration(Duration::from_secs(10)),
            Duration::from_millis(500)
        );
        assert_eq!(
            scale.timeout(Duration::from_secs(1)),
            Duration::from_secs(20)
        );
    }

    #[test]
    fn an_invalid_factor_is_refused() {
        assert!(LoadScale::parse("0").is_none());
        assert!(LoadScale::parse("-1").is_none());
        assert!(LoadScale::parse("fast").is_none());
    }
}
