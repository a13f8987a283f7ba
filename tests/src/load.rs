//! Loads of real connections, and the reports that clients keep.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use crate::{
    clock::{self, Instant},
    scale::Scale,
};

pub mod connect;
pub mod hold;
pub mod kubelet;
pub mod race;
pub mod tcp;
pub mod udp;

/// How long one connect or one answer may take before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same in a slow virtual machine, which may stand still for as long as its host does something
/// else.
const PATIENCE_AT_MOST: Duration = Duration::from_secs(8);

/// How long one connect or one answer may take here before it counts as lost.
#[must_use]
pub fn patience() -> Duration {
    Scale::from_environment()
        .patience(PATIENCE)
        .min(PATIENCE_AT_MOST)
}

/// Makes sockets where the load is to come from.
pub type Sockets<'a> = &'a (dyn Fn(Domain, Type) -> io::Result<Socket> + Sync);

/// Sockets of this process: for a load process that runs in a place.
///
/// # Errors
///
/// With the kernel's error.
pub fn own_sockets(domain: Domain, kind: Type) -> io::Result<Socket> {
    Socket::new(domain, kind, None)
}

/// Ends loads before their time: all that have it, together.
#[derive(Clone, Debug, Default)]
pub struct Enough(Arc<AtomicBool>);

impl Enough {
    /// Does something, and ends the loads behind it, whatever became of it.
    pub fn after<T>(&self, body: impl FnOnce() -> T) -> T {
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _end = End(&self.0);
        body()
    }

    fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// An open load: attempts start at their time, whatever became of earlier ones.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where to, in turn.
    pub to: Vec<SocketAddr>,
    /// The Service that is meant, told to the servers.
    pub service: Option<String>,
    /// Attempts a second.
    pub rate: u32,
    /// How long at most.
    pub lasting: Duration,
    /// How many attempts may be under way at once.
    pub workers: u32,
    /// What ends it sooner.
    pub enough: Enough,
}

impl Plan {
    /// A load of one target.
    #[must_use]
    pub fn new(to: SocketAddr, rate: u32, lasting: Duration) -> Self {
        Self {
            to: vec![to],
            service: None,
            rate,
            lasting,
            workers: 8,
            enough: Enough::default(),
        }
    }

    /// Ended sooner by what others may have, too.
    #[must_use]
    pub fn until(mut self, enough: &Enough) -> Self {
        self.enough = enough.clone();
        self
    }

    /// Told to the servers, which compare it with the Services they belong to.
    #[must_use]
    pub fn meant_for(mut self, service: &str) -> Self {
        self.service = Some(service.to_owned());
        self
    }

    fn attempts(&self) -> u64 {
        let attempts = u128::from(self.rate) * self.lasting.as_millis() / 1000;
        u64::try_from(attempts).unwrap_or(u64::MAX).max(1)
    }
}

/// An attempt that was answered.
#[derive(Debug)]
pub(crate) struct Answered {
    /// The name that the server answered with.
    pub(crate) server: String,
    /// How long the connect took.
    pub(crate) connect: Duration,
    /// Whether the socket's peer, or the sender of the answer, is what was dialled.
    pub(crate) peer_as_dialled: bool,
}

/// An attempt that failed, with the step at which it did.
#[derive(Debug)]
pub(crate) struct Failed {
    step: &'static str,
    error: io::Error,
}

impl Failed {
    pub(crate) const fn at(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self { step, error }
    }

    /// Whether the product ended the socket, since its backend had gone.
    pub(crate) fn was_ended(&self) -> bool {
        let code = self.error.raw_os_error();
        code.is_some_and(|code| {
            [
                nix::libc::ECONNABORTED,
                nix::libc::EDESTADDRREQ,
                nix::libc::ENOTCONN,
            ]
            .contains(&code)
        })
    }

    fn label(&self) -> String {
        format!("{} at {}", errno(&self.error), self.step)
    }
}

/// The kernel's name of an error.
pub fn errno(error: &io::Error) -> String {
    match (error.raw_os_error(), error.kind()) {
        // A blocking call that met its limit of time says one of these.
        (Some(nix::libc::EAGAIN | nix::libc::EINPROGRESS), _) => "timeout".to_owned(),
        (Some(number), _) => format!("{:?}", Errno::from_raw(number)),
        (None, kind) => format!("{kind:?}"),
    }
}

/// How often something happened, and when first and last, since the load began.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Seen {
    /// How often.
    pub count: u64,
    /// The first time.
    pub first_ms: u64,
    /// The last time.
    pub last_ms: u64,
}

impl Seen {
    const fn at(ms: u64) -> Self {
        Self {
            count: 1,
            first_ms: ms,
            last_ms: ms,
        }
    }

    fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.first_ms = self.first_ms.min(other.first_ms);
        self.last_ms = self.last_ms.max(other.last_ms);
    }
}

/// Times of one kind of call.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// Half of them took at most this long.
    pub p50_ns: u64,
    /// 99 of 100 took at most this long.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// How many took less than so many microseconds, and not less than half of that.
    pub histogram: BTreeMap<u64, u64>,
}

impl Latency {
    pub(crate) fn of(mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        let mut histogram = BTreeMap::new();
        for time in &times {
            *histogram
                .entry((time / 1000 + 1).next_power_of_two())
                .or_default() += 1;
        }
        Self {
            count: u64::try_from(times.len()).unwrap_or(u64::MAX),
            p50_ns: percentile(&times, 50),
            p99_ns: percentile(&times, 99),
            max_ns: times.last().copied().unwrap_or(0),
            histogram,
        }
    }
}

/// The value that so many of a hundred don't exceed, of sorted ones; 0 of none.
#[must_use]
pub fn percentile(sorted: &[u64], hundredths: usize) -> u64 {
    let place = (sorted.len() * hundredths).div_ceil(100).saturating_sub(1);
    sorted.get(place).copied().unwrap_or(0)
}

/// What a load came to.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// When it began, in milliseconds since 1970.
    pub began_ms: u64,
    /// How long it took.
    pub took_ms: u64,
    /// How many attempts were made.
    pub attempts: u64,
    /// How many were answered.
    pub answered: u64,
    /// How many of these showed another peer than the one dialled.
    pub other_peer: u64,
    /// The failures, by error and step.
    pub failures: BTreeMap<String, Seen>,
    /// The answers, by server.
    pub servers: BTreeMap<String, Seen>,
    /// How long connects took.
    pub connect: Latency,
}

impl Report {
    /// How many attempts failed.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failures.values().map(|seen| seen.count).sum()
    }
}

/// What the workers have seen so far.
#[derive(Debug, Default)]
struct Tally {
    attempts: u64,
    other_peer: u64,
    failures: BTreeMap<String, Seen>,
    servers: BTreeMap<String, Seen>,
    times: Vec<u64>,
}

impl Tally {
    fn note(&mut self, ms: u64, outcome: Result<Answered, Failed>) {
        match outcome {
            Ok(Answered {
                server,
                connect,
                peer_as_dialled,
            }) => {
                self.times.push(nanoseconds(connect));
                self.other_peer += u64::from(!peer_as_dialled);
                note(&mut self.servers, server, Seen::at(ms));
            }
            Err(failed) => note(&mut self.failures, failed.label(), Seen::at(ms)),
        }
    }

    fn merge(&mut self, other: Self) {
        self.attempts += other.attempts;
        self.other_peer += other.other_peer;
        self.times.extend(other.times);
        other
            .failures
            .into_iter()
            .for_each(|(key, seen)| note(&mut self.failures, key, seen));
        other
            .servers
            .into_iter()
            .for_each(|(key, seen)| note(&mut self.servers, key, seen));
    }
}

fn note(counts: &mut BTreeMap<String, Seen>, key: String, seen: Seen) {
    counts
        .entry(key)
        .and_modify(|it| it.merge(seen))
        .or_insert(seen);
}

pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The time of day, by which reports of several processes are compared.
pub fn since_epoch_ms() -> u64 {
    milliseconds(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// Runs an open load: attempt number i starts i / rate seconds after the beginning, or as soon as
/// a worker is free.
pub(crate) fn run(
    plan: &Plan,
    attempt: &(dyn Fn(SocketAddr) -> Result<Answered, Failed> + Sync),
) -> Report {
    let total = plan.attempts();
    let next = AtomicU64::new(0);
    let tallies = Mutex::new(Tally::default());
    let began_ms = since_epoch_ms();
    let start = Instant::now();
    let worker = || {
        let mut tally = Tally::default();
        let mut targets = plan.to.iter().cycle();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= total {
                break;
            }
            let due = Duration::from_secs(1) * u32::try_from(number).unwrap_or(u32::MAX)
                / plan.rate.max(1);
            if let Some(early) = due.checked_sub(start.elapsed()) {
                clock::pause(early);
            }
            if plan.enough.is_said() {
                break;
            }
            let Some(target) = targets.next() else { break };
            tally.attempts += 1;
            let outcome = attempt(*target);
            tally.note(milliseconds(start.elapsed()), outcome);
        }
        tallies
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .merge(tally);
    };
    thread::scope(|scope| {
        for _ in 0..plan.workers.max(1) {
            scope.spawn(worker);
        }
    });

    let Tally {
        attempts,
        other_peer,
        failures,
        servers,
        times,
    } = tallies.into_inner().unwrap_or_else(PoisonError::into_inner);
    Report {
        began_ms,
        took_ms: milliseconds(start.elapsed()),
        attempts,
        answered: servers.values().map(|seen| seen.count).sum(),
        other_peer,
        failures,
        servers,
        connect: Latency::of(times),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_attempt_is_counted_once_whatever_becomes_of_it() {
        let mut plan = Plan::new(
            "192.0.2.1:80".parse().unwrap(),
            10_000,
            Duration::from_millis(10),
        );
        plan.to.push("192.0.2.2:80".parse().unwrap());

        let report = run(&plan, &|to| {
            if to.ip().to_string().ends_with('2') {
                return Err(Failed::at("connect")(io::Error::from_raw_os_error(111)));
            }
            Ok(Answered {
                server: "a".to_owned(),
                connect: Duration::from_micros(3),
                peer_as_dialled: false,
            })
        });

        assert_eq!(report.attempts, 100);
        assert_eq!(report.answered + report.failed(), 100);
        assert_eq!(report.other_peer, report.answered);
        assert_eq!(report.servers["a"].count, report.answered);
        assert_eq!(
            report.failures.keys().collect::<Vec<_>>(),
            ["ECONNREFUSED at connect"]
        );
        assert_eq!(
            report.connect.histogram,
            BTreeMap::from([(4, report.answered)])
        );
    }

    #[test]
    fn a_load_ends_once_it_is_enough_and_counts_what_was_tried() {
        let plan = Plan::new("192.0.2.1:80".parse().unwrap(), 1000, Duration::MAX);
        let tried = AtomicU64::new(0);
        let fails = |_| Err(Failed::at("connect")(io::Error::from_raw_os_error(111)));
        let attempt = |to| {
            if tried.fetch_add(1, Ordering::Relaxed) == 20 {
                plan.enough.after(|| ());
            }
            fails(to)
        };

        let report = run(&plan, &attempt);

        assert_eq!(report.attempts, tried.load(Ordering::Relaxed));
        assert!((21..40).contains(&report.attempts), "{report:?}");
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let times: Vec<u64> = (1..=200).collect();

        assert_eq!(percentile(&times, 50), 100);
        assert_eq!(percentile(&times, 99), 198);
        assert_eq!(percentile(&[7], 99), 7);
        assert_eq!(percentile(&[], 99), 0);
    }
}
