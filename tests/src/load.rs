//! Loads: clients that open real connections and report on them.

use std::{
    io,
    net::SocketAddr,
    num::ParseIntError,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use clap::Args;
use nix::{errno::Errno, libc};
use socket2::{Domain, Socket, Type};

use self::report::ReportBuilder;
pub use self::report::{Latency, Occurrences, Report, percentile};
use crate::{
    clock::{self, Instant},
    load_scale::LoadScale,
    sandbox,
};

pub mod connect;
pub mod hold;
pub mod kubelet;
pub mod race;
mod report;
pub mod stream;
pub mod tcp;
pub mod udp;

/// The timeout for a connect() or a response.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum scaled timeout, for slow virtual machines that may stall while their host is busy.
const MAX_TIMEOUT: Duration = Duration::from_secs(8);

/// The default maximum number of concurrent attempts.
const WORKERS: u32 = 8;

/// Returns the timeout for a connect() or a response, scaled up on slow machines.
#[must_use]
pub fn timeout() -> Duration {
    LoadScale::from_environment()
        .timeout(TIMEOUT)
        .min(MAX_TIMEOUT)
}

/// A function that creates the sockets for a load, either in a sandbox or in this process.
pub type CreateSocket<'a> = &'a (dyn Fn(Domain, Type) -> io::Result<Socket> + Sync);

/// Creates a socket in this process, for a load that already runs inside a sandbox.
pub fn create_local_socket(domain: Domain, kind: Type) -> io::Result<Socket> {
    Socket::new(domain, kind, None)
}

/// A signal that stops all the loads that share it.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Runs `body`, then stops the loads; also stops them if `body` panics.
    pub fn stop_after<T>(&self, body: impl FnOnce() -> T) -> T {
        struct End<'a>(&'a AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _end = End(&self.0);
        body()
    }

    /// Returns true if the loads should stop.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// An open-loop load: each attempt starts on schedule, no matter how long earlier ones take.
#[derive(Args, Clone, Debug)]
pub struct Plan {
    /// A target address. If several are given, they are used in turn.
    #[arg(long, required = true)]
    pub to: Vec<SocketAddr>,
    /// The name of the intended Service, which is included in each request so that servers can detect
    /// misrouted ones.
    #[arg(long)]
    pub service: Option<String>,
    /// The number of attempts per second.
    #[arg(long)]
    pub rate: u32,
    /// The maximum duration of the load, in milliseconds.
    #[arg(long = "millis", value_parser = parse_millis)]
    pub duration: Duration,
    /// The maximum number of concurrent attempts.
    #[arg(long, default_value_t = WORKERS)]
    pub workers: u32,
    /// The signal that stops the load early.
    #[arg(skip)]
    pub stop: StopSignal,
}

impl Plan {
    /// Creates a load with a single target.
    #[must_use]
    pub fn new(to: SocketAddr, rate: u32, duration: Duration) -> Self {
        Self {
            to: vec![to],
            service: None,
            rate,
            duration,
            workers: WORKERS,
            stop: StopSignal::default(),
        }
    }

    /// Sets the signal that stops the load early. Other loads may share it.
    #[must_use]
    pub fn stop_on(mut self, stop: &StopSignal) -> Self {
        self.stop = stop.clone();
        self
    }

    /// Sets the intended Service. Other Services' servers then count the load's requests as foreign.
    #[must_use]
    pub fn for_service(mut self, service: &str) -> Self {
        self.service = Some(service.to_owned());
        self
    }

    fn attempts(&self) -> u64 {
        let attempts = u128::from(self.rate) * self.duration.as_millis() / 1000;
        u64::try_from(attempts).unwrap_or(u64::MAX).max(1)
    }
}

/// A successful attempt.
#[derive(Debug)]
pub(crate) struct Success {
    /// The name of the server, taken from the response.
    pub(crate) server: String,
    /// The time that connect() took.
    pub(crate) connect: Duration,
    /// True if the socket's peer, or the sender of the response, is the dialled address.
    pub(crate) is_peer_dialled: bool,
}

/// A failed attempt: the step that failed, and its error.
#[derive(Debug)]
pub(crate) struct Failure {
    step: &'static str,
    error: io::Error,
}

impl Failure {
    pub(crate) const fn at(step: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |error| Self { step, error }
    }

    /// Returns true if the error is one that occurs when Culvert has terminated the socket because its
    /// backend was removed.
    pub(crate) fn is_of_terminated_socket(&self) -> bool {
        matches!(
            self.error.raw_os_error(),
            Some(libc::ECONNABORTED | libc::EDESTADDRREQ | libc::ENOTCONN)
        )
    }

    fn label(&self) -> String {
        format!("{} at {}", error_name(&self.error), self.step)
    }
}

/// Creates a socket of the target's address family, with a read timeout.
fn create_socket(to: SocketAddr, kind: Type, sockets: CreateSocket<'_>) -> Result<Socket, Failure> {
    let socket = sockets(Domain::for_address(to), kind).map_err(Failure::at("socket"))?;
    let result = socket.set_read_timeout(Some(timeout()));
    result.map_err(Failure::at("socket"))?;
    Ok(socket)
}

/// Opens a TCP connection, and returns its socket and the time that connect() took.
fn connect_tcp(to: SocketAddr, sockets: CreateSocket<'_>) -> Result<(Socket, Duration), Failure> {
    let socket = create_socket(to, Type::STREAM, sockets)?;
    let start = Instant::now();
    sandbox::connect_within(&socket, to, timeout()).map_err(Failure::at("connect"))?;
    Ok((socket, start.elapsed()))
}

/// Returns the short name of an error, such as `ECONNREFUSED`.
pub fn error_name(error: &io::Error) -> String {
    match (error.raw_os_error(), error.kind()) {
        // A blocking call that times out fails with one of these two errors.
        (Some(libc::EAGAIN | libc::EINPROGRESS), _) => "timeout".to_owned(),
        (Some(number), _) => format!("{:?}", Errno::from_raw(number)),
        (None, kind) => format!("{kind:?}"),
    }
}

pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Parses a command-line argument as a duration in milliseconds.
fn parse_millis(text: &str) -> Result<Duration, ParseIntError> {
    text.parse().map(Duration::from_millis)
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the wall-clock time in milliseconds since 1970, so that times from different processes can be
/// compared.
pub fn since_epoch_ms() -> u64 {
    milliseconds(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

/// Runs an open-loop load. Attempt number i starts i / rate seconds after the load does. If all workers are
/// busy then, it starts as soon as one is free.
pub(crate) fn run(
    plan: &Plan,
    attempt: &(dyn Fn(SocketAddr) -> Result<Success, Failure> + Sync),
) -> Report {
    let total = plan.attempts();
    let next = AtomicU64::new(0);
    let results = Mutex::new(ReportBuilder::default());
    let began_ms = since_epoch_ms();
    let start = Instant::now();
    let worker = || {
        let mut builder = ReportBuilder::default();
        let mut targets = plan.to.iter().cycle();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= total {
                break;
            }
            let start_offset = Duration::from_secs(1) * u32::try_from(number).unwrap_or(u32::MAX)
                / plan.rate.max(1);
            if let Some(wait) = start_offset.checked_sub(start.elapsed()) {
                clock::pause(wait);
            }
            if plan.stop.is_stopped() {
                break;
            }
            let Some(target) = targets.next() else { break };
            builder.report.attempts += 1;
            let outcome = attempt(*target);
            builder.record(milliseconds(start.elapsed()), outcome);
        }
        results
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .merge(builder);
    };
    thread::scope(|scope| {
        for _ in 0..plan.workers.max(1) {
            scope.spawn(worker);
        }
    });

    let builder = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    builder.build(began_ms, milliseconds(start.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_attempt_is_counted_once_as_answered_or_failed() {
        let mut plan = Plan::new(
            "192.0.2.1:80".parse().unwrap(),
            10_000,
            Duration::from_millis(10),
        );
        plan.to.push("192.0.2.2:80".parse().unwrap());

        let report = run(&plan, &|to| {
            if to.ip().to_string().ends_with('2') {
                return Err(Failure::at("connect")(io::Error::from_raw_os_error(111)));
            }
            Ok(Success {
                server: "a".to_owned(),
                connect: Duration::from_micros(3),
                is_peer_dialled: false,
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
        let connect = (report.connect.count, report.connect.p50_ns);
        assert_eq!(connect, (report.answered, 3000));
    }

    #[test]
    fn a_stopped_load_reports_the_attempts_so_far() {
        let plan = Plan::new("192.0.2.1:80".parse().unwrap(), 1000, Duration::MAX);
        let tried = AtomicU64::new(0);
        let fail = |_| Err(Failure::at("connect")(io::Error::from_raw_os_error(111)));
        let attempt = |to| {
            if tried.fetch_add(1, Ordering::Relaxed) == 20 {
                plan.stop.stop_after(|| ());
            }
            fail(to)
        };

        let report = run(&plan, &attempt);

        assert_eq!(report.attempts, tried.load(Ordering::Relaxed));
        assert!((21..40).contains(&report.attempts), "{report:?}");
    }
}
