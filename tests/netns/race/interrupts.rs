//! Timer interrupts that delay the readers. A frontend lookup takes a hundred nanoseconds, so writes in the
//! wrong order affect only a reader that is interrupted during a lookup.

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

use super::map_writers::pin_to_cpu;

/// The number of timers that expire simultaneously. The kernel handles all of them in one interrupt, which
/// takes several microseconds: enough time for a writer to make a few map writes.
const TIMERS: usize = 32;

/// The delay after which the timers expire. It must be longer than it takes to set all of them.
const LEAD: Duration = Duration::from_micros(60);

/// Interrupts a CPU repeatedly until `stop` is set, and returns how many times it did so.
pub(crate) fn interrupt_cpu(cpu: u32, stop: &AtomicBool) -> Result<u64> {
    pin_to_cpu(cpu)?;
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
