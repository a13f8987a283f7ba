//! The clock for the validity of certificates. Machines without a clock that runs while they are off wake in 1970; their
//! certificates are verified as of the last time that is known.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::{SignedDuration, Timestamp};
use parking_lot::{Mutex, const_mutex};
use tracing::warn;

use super::key_directory;
use crate::clock::since_boot;

/// The date of this release. No certificate is verified as of an earlier time.
const RELEASED: Timestamp = Timestamp::constant(1_795_996_800, 0);

/// Two clocks that differ by more are reported, and their time is not written down.
const MAX_SKEW: SignedDuration = SignedDuration::from_secs(30);

/// Returns a difference between two clocks, in seconds, if it must be reported.
#[must_use]
pub fn large_skew(seconds: Option<f64>) -> Option<f64> {
    seconds.filter(|seconds| seconds.abs() > MAX_SKEW.as_secs_f64())
}

/// The interval between two writes of the time, which flash memory bears for years.
const WRITE_INTERVAL: Duration = Duration::from_mins(10);

/// The name of the file in the state directory.
const FILE: &str = "last-time";
/// The mode of the file.
const MODE: u32 = 0o600;

/// The clock of this process, whose machine has only one.
static CLOCK: Mutex<Clock> = const_mutex(Clock {
    shift: SignedDuration::ZERO,
    earliest: None,
    file: None,
    confirmed: None,
    tried: None,
});

/// The state of the clock.
#[derive(Debug)]
struct Clock {
    /// The difference to the machine's clock, for tests.
    shift: SignedDuration,
    /// A time that has been true, and the time since boot then: the release, what an earlier process wrote down, or what this
    /// one did.
    earliest: Option<(Timestamp, Duration)>,
    file: Option<PathBuf>,
    /// The last time that another machine has confirmed, and the time since boot then.
    confirmed: Option<(Timestamp, Duration)>,
    /// The time since boot at the last try to write.
    tried: Option<Duration>,
}

impl Clock {
    fn of_machine(&self) -> Timestamp {
        Timestamp::now()
            .saturating_add(self.shift)
            .unwrap_or(Timestamp::MAX)
    }

    fn now(&self) -> Timestamp {
        let earliest = self.earliest.map_or(RELEASED, since);
        self.of_machine().max(earliest)
    }
}

/// Returns the time now that follows from a time in the past.
fn since((time, at): (Timestamp, Duration)) -> Timestamp {
    let elapsed = since_boot().saturating_sub(at);
    time.saturating_add(elapsed).unwrap_or(time)
}

/// Returns the time as of which certificates are verified: that of the machine's clock, but never earlier than this release, nor
/// than the last time that was written down.
#[must_use]
pub fn now() -> Timestamp {
    CLOCK.lock().now()
}

/// Returns the time of the machine's clock.
#[must_use]
pub fn of_machine() -> Timestamp {
    CLOCK.lock().of_machine()
}

/// Describes the time as of which a certificate was verified.
pub(super) fn describe(now: Timestamp) -> String {
    let machine = of_machine();
    if now.duration_since(machine).abs() <= MAX_SKEW || problem().is_none() {
        return format!("this machine's clock says {now:.0}");
    }
    format!("this machine's clock says {machine:.0}, but it was verified as of {now:.0}")
}

/// Returns a description of the clocks if the machine's clock shows a time that can't be true.
#[must_use]
pub fn problem() -> Option<String> {
    let clock = CLOCK.lock();
    let (machine, now) = (clock.of_machine(), clock.now());
    drop(clock);
    (now.duration_since(machine) > MAX_SKEW).then(|| {
        format!(
            "the clock of this machine says {machine:.0}, but it was later already; certificates are verified as of {now:.0}"
        )
    })
}

/// Reads the last time that was written down in a state directory, and writes it down there from now on.
pub fn open(directory: &Path) {
    let file = directory.join(FILE);
    let read = fs::read_to_string(&file);
    let mut clock = CLOCK.lock();
    clock.earliest = Some((RELEASED, since_boot()));
    match read.map(|text| text.trim().parse::<Timestamp>()) {
        Ok(Ok(earliest)) => {
            clock.earliest = Some((earliest.max(RELEASED), since_boot()));
        }
        Ok(Err(error)) => {
            warn!(file = %file.display(), %error, "the last time is not valid, and ignored");
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => warn!(file = %file.display(), %error, "cannot read the last time"),
    }
    clock.file = Some(file);
    drop(clock);
    if let Some(problem) = problem() {
        warn!(problem, "the clock of this machine is wrong");
    }
}

/// Remembers that the clock of another machine shows the same time, so that it is written down. Without such a confirmation, a
/// time that is too late would make valid certificates expire even after the clock has been set right.
pub fn confirm(other: Timestamp) {
    let mut clock = CLOCK.lock();
    let now = clock.now();
    if now.duration_since(other).abs() <= MAX_SKEW {
        clock.confirmed = Some((now, since_boot()));
    }
}

/// Remembers a time that a trusted CA has shown to be past, while the clock of this machine can't be right.
pub(super) fn learn(past: Timestamp) {
    if problem().is_none() {
        return;
    }
    let mut clock = CLOCK.lock();
    if past <= clock.now() {
        return;
    }
    clock.earliest = Some((past, since_boot()));
    drop(clock);
    warn!(%past, "the clock of this machine is wrong: a certificate is valid from a later time on");
}

/// Writes down the time that follows from the last one that another machine has confirmed, every ten minutes. Blocks.
pub(super) fn write_down() {
    let mut clock = CLOCK.lock();
    let is_due = |tried: Duration| since_boot().saturating_sub(tried) >= WRITE_INTERVAL;
    let (Some(confirmed), Some(file)) = (clock.confirmed, clock.file.clone()) else {
        return;
    };
    if !clock.tried.is_none_or(is_due) {
        return;
    }
    clock.tried = Some(since_boot());
    drop(clock);
    let now = since(confirmed);
    let text = format!("{now:.0}\n").into_bytes();
    match key_directory::replace_files(&[(file, text, MODE)]) {
        Ok(()) => CLOCK.lock().earliest = Some((now, since_boot())),
        Err(error) => warn!(%error, "cannot write the time down"),
    }
}

/// Lets the machine's clock differ from its true one. For tests.
pub fn shift(by: SignedDuration) {
    CLOCK.lock().shift = by;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(shift: SignedDuration, earliest: Option<Timestamp>) -> Clock {
        Clock {
            shift,
            earliest: earliest.map(|earliest| (earliest, since_boot())),
            file: None,
            confirmed: None,
            tried: None,
        }
    }

    #[test]
    fn the_time_is_never_earlier_than_the_release_and_the_last_that_was_written() {
        let to_1970 = Timestamp::UNIX_EPOCH.duration_since(Timestamp::now());
        let later = RELEASED + SignedDuration::from_hours(1000);

        let unknown = clock(to_1970, None);
        assert!(unknown.of_machine() < RELEASED);
        assert_eq!(unknown.now(), RELEASED);
        let known = clock(to_1970, Some(later)).now();
        assert!(known >= later && known.duration_since(later) < SignedDuration::from_secs(60));
        let right = clock(SignedDuration::ZERO, Some(RELEASED));
        assert!(right.now().duration_since(Timestamp::now()).abs() < MAX_SKEW);
    }
}
