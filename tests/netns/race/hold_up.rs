//! Holding up what runs on a CPU: a look-up of a front is over in a hundred nanoseconds, and what is
//! wrong with a writer shows only to a reader that takes longer.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Result;
use nix::{
    sys::{
        prctl::set_timerslack,
        time::TimeSpec,
        timerfd::{self, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
    time::{ClockId, clock_gettime},
};
use tunnel_tests::clock;

use super::writers::keep_to;

/// How many timers expire at once: the kernel goes through them in one interrupt, for some
/// microseconds, which is as long as a writer takes for a few writes.
const TIMERS: usize = 32;

/// How long from setting the timers until they expire: longer than setting them takes.
const LEAD: Duration = Duration::from_micros(60);

/// Interrupts a CPU again and again until told to stop. Gives how often.
pub(crate) fn hold_up(cpu: u32, stop: &AtomicBool) -> Result<u64> {
    keep_to(cpu)?;
    set_timerslack(1)?;
    let timers = (0..TIMERS)
        .map(|_| TimerFd::new(timerfd::ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC))
        .collect::<nix::Result<Vec<_>>>()?;
    let mut times = 0;
    while !stop.load(Ordering::Relaxed) {
        let at = now()? + LEAD;
        for timer in &timers {
            let at = Expiration::OneShot(TimeSpec::from_duration(at));
            timer.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
        }
        clock::pause(at.saturating_sub(now()?));
        times += 1;
    }
    Ok(times)
}

fn now() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}
