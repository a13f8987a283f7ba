//! Logs one kernel program's events: loads the program's logging variant with the pinned maps, and runs it in
//! place of the plain program until this process exits.

use std::{
    convert::Infallible,
    error::Error,
    fmt, mem,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use aya::{Ebpf, programs::ProgramFd};
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::{
    addr::Protocol,
    reason::Reason,
    table::{AttachPoint, Program},
};

use super::{
    attachment::Attachment,
    data_path::{self, DataPath},
    programs::{self, Programs},
};

/// The object that contains the programs' logging variants, compiled by the build script.
pub static OBJECT: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/culvert-log.bpf.o"));

/// The interval at which the ring buffer is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The maximum number of events that are logged per interval. Further events wait in the ring buffer. When it
/// is full, new events are lost, and counted as lost.
const MAX_PER_INTERVAL: u32 = 100;

/// A kernel program whose events are logged.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct KernelLog {
    /// The program's name, such as `connect4`.
    pub program: String,
    /// The most detailed level that is logged.
    #[serde(default)]
    pub level: KernelLogLevel,
}

/// The level of detail, numbered as in the kernel programs.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum KernelLogLevel {
    /// Failures only.
    Error = 1,
    /// Possible failures, too.
    Warn,
    /// Changes of state, too.
    Info,
    /// The program's decisions, too.
    #[default]
    Debug,
    /// Traffic that the program ignores, too.
    Trace,
}

impl fmt::Display for KernelLogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// An error that can occur when replacing a program with its logging variant. The plain program then stays
/// attached.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} the logging variant of program {program}")]
pub struct KernelLogError {
    step: &'static str,
    program: String,
    #[source]
    source: Box<dyn Error + Send + Sync>,
}

/// A program that logs its events. Dropping this value restores the plain program. The guard is an exception:
/// its logging variant stays attached until the daemon next starts.
pub struct LoggingProgram {
    program: String,
    /// The attached programs, and the plain program to restore; `None` for the guard.
    plain: Option<(Attachment, &'static Program, ProgramFd)>,
    /// Stops the reader when dropped.
    stop: Option<Sender<Infallible>>,
    reader: Option<JoinHandle<()>>,
}

impl DataPath {
    /// Replaces an attached program with its logging variant, and writes its events to the log under the
    /// target `kernel`.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no such program, if it is not attached, or if the kernel rejects the
    /// variant.
    pub fn enable_logging(
        &mut self,
        wanted: &KernelLog,
        attachment: &Attachment,
    ) -> Result<LoggingProgram, KernelLogError> {
        let KernelLog { program, level } = wanted;
        let failed = |step| {
            let program = program.clone();
            move |source| KernelLogError {
                step,
                program,
                source,
            }
        };
        let row = Program::named(program)
            .ok_or_else(|| failed("load")("the object has no such program".into()))?;
        let mut variant = self.load_variant(row, *level).map_err(failed("load"))?;
        let (stop, stopped) = mpsc::channel();
        let writer = Arc::new(LogWriter {
            program: program.clone(),
            rate_limit: Mutex::new(RateLimit::new(stopped)),
        });
        let logger = EbpfLogger::init_with_logger(&mut variant, Arc::clone(&writer))
            .map_err(|error| failed("open the ring buffer of")(error.into()))?;
        // If the program can't be attached, `stop` is dropped, which stops the reader.
        let reader = thread::Builder::new()
            .name("kernel log".to_owned())
            .spawn(move || read_events(logger, &writer))
            .map_err(|error| failed("read the events of")(error.into()))?;
        let variant = Programs::new(variant);
        let plain = match row.attach_point {
            AttachPoint::Devices => {
                self.logging_device_program = Some((row, variant));
                None
            }
            AttachPoint::Cgroup => {
                let replaced = variant
                    .fd(row)
                    .and_then(|program| attachment.replace_program(row, program));
                let plain = replaced.map_err(|error| failed("attach")(error.into()))?;
                Some((attachment.clone(), row, plain))
            }
        };
        Ok(LoggingProgram {
            program: program.clone(),
            plain,
            stop: Some(stop),
            reader: Some(reader),
        })
    }

    fn load_variant(
        &self,
        row: &Program,
        level: KernelLogLevel,
    ) -> Result<Ebpf, Box<dyn Error + Send + Sync>> {
        let level = level as u8;
        let mut loader = data_path::loader(&self.maps, &self.globals);
        loader.override_global(aya_log::LEVEL, &level, true);
        let mut variant = loader.load(OBJECT)?;
        programs::load(&mut variant, row)?;
        Ok(variant)
    }
}

impl Drop for LoggingProgram {
    fn drop(&mut self) {
        if let Some((attachment, row, plain)) = self.plain.take()
            && let Err(error) = attachment.replace_program(row, plain)
        {
            let (program, error) = (&self.program, &error as &dyn Error);
            tracing::warn!(
                %program,
                error,
                "cannot restore the plain program; the next start of the daemon restores it"
            );
        }
        drop(self.stop.take());
        if let Some(reader) = self.reader.take()
            && reader.join().is_err()
        {
            tracing::warn!(program = %self.program, "the thread that reads events of the program panicked");
        }
    }
}

/// Reads the ring buffer until the channel closes. Runs in a separate thread, since under a flood of events
/// the ring buffer is never empty.
fn read_events(mut logger: EbpfLogger<Arc<LogWriter>>, writer: &LogWriter) {
    while writer.rate_limit().wait_for_interval() {
        logger.flush();
    }
    // Reads the remaining events.
    logger.flush();
}

/// Writes events to this process's log, at a limited rate.
struct LogWriter {
    program: String,
    rate_limit: Mutex<RateLimit>,
}

impl LogWriter {
    fn rate_limit(&self) -> MutexGuard<'_, RateLimit> {
        self.rate_limit
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log for LogWriter {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let program = &*self.program;
        if !self.rate_limit().admit(program) {
            return;
        }
        let text = with_names(&record.args().to_string());
        match record.level() {
            log::Level::Error => tracing::error!(target: "kernel", program, "{text}"),
            log::Level::Warn => tracing::warn!(target: "kernel", program, "{text}"),
            log::Level::Info => tracing::info!(target: "kernel", program, "{text}"),
            log::Level::Debug => tracing::debug!(target: "kernel", program, "{text}"),
            log::Level::Trace => tracing::trace!(target: "kernel", program, "{text}"),
        }
    }

    fn flush(&self) {}
}

/// The rate limit for events.
struct RateLimit {
    stopped: Receiver<Infallible>,
    remaining: u32,
    is_ending: bool,
    was_exceeded: bool,
}

impl RateLimit {
    const fn new(stopped: Receiver<Infallible>) -> Self {
        Self {
            stopped,
            remaining: MAX_PER_INTERVAL,
            is_ending: false,
            was_exceeded: false,
        }
    }

    /// Waits for the next interval; returns false if the reader should stop.
    fn wait_for_interval(&mut self) -> bool {
        if !self.is_ending {
            self.is_ending =
                self.stopped.recv_timeout(POLL_INTERVAL) != Err(RecvTimeoutError::Timeout);
            self.remaining = MAX_PER_INTERVAL;
        }
        !self.is_ending
    }

    /// Returns true if an event may be logged. If the limit has been reached, first waits for the next
    /// interval, unless the reader should stop.
    fn admit(&mut self, program: &str) -> bool {
        if self.remaining == 0 {
            if !mem::replace(&mut self.was_exceeded, true) {
                tracing::warn!(
                    target: "kernel",
                    program,
                    "too many events: they wait in the ring buffer, and are lost when it is full \
                     (reason log_events_lost)"
                );
            }
            self.wait_for_interval();
        }
        let remaining = self.remaining.checked_sub(1);
        self.remaining = remaining.unwrap_or(0);
        remaining.is_some()
    }
}

/// Returns an event's text with names instead of numbers, and with IPv4 addresses in their usual form.
fn with_names(text: &str) -> String {
    let words: Vec<_> = text.split(' ').map(field_with_name).collect();
    words.join(" ")
}

fn field_with_name(text: &str) -> String {
    let Some((name, value)) = text.split_once('=') else {
        return text.to_owned();
    };
    let readable = match name {
        "reason" => {
            let reason = value.parse().ok().and_then(Reason::from_index);
            reason.map(|reason| reason.label().to_owned())
        }
        "protocol" => {
            let mut known = [Protocol::TCP, Protocol::UDP].into_iter();
            let known = known.find(|known| known.number().to_string() == value);
            known.map(|known| known.to_string())
        }
        _ => {
            let address = value.parse().ok();
            address.map(|address: IpAddr| address.to_canonical().to_string())
        }
    };
    readable.map_or_else(|| text.to_owned(), |value| format!("{name}={value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_names_instead_of_numbers() {
        let raw = "translated: destination=::ffff:10.96.0.10 port=80 protocol=6 \
                   backend=fd00::5 backend_port=8080 reason=0";

        assert_eq!(
            with_names(raw),
            "translated: destination=10.96.0.10 port=80 protocol=TCP \
             backend=fd00::5 backend_port=8080 reason=translated"
        );
        // A number that has no name stays a number.
        assert_eq!(
            with_names("reason=63 protocol=132"),
            "reason=63 protocol=132"
        );
    }

    #[test]
    fn a_flood_waits_for_the_next_interval_but_not_at_the_end() {
        let (stop, stopped) = mpsc::channel();
        let mut rate_limit = RateLimit::new(stopped);

        // The last event waits for the second interval.
        let logged = (0..=MAX_PER_INTERVAL)
            .filter(|_| rate_limit.admit("connect4"))
            .count();
        assert_eq!(u32::try_from(logged), Ok(MAX_PER_INTERVAL + 1));
        assert!(rate_limit.was_exceeded);

        drop(stop);
        let logged = (0..3 * MAX_PER_INTERVAL)
            .filter(|_| rate_limit.admit("connect4"))
            .count();
        assert_eq!(u32::try_from(logged), Ok(2 * MAX_PER_INTERVAL - 1));
    }

    #[test]
    fn levels_have_the_numbers_that_the_programs_compare() {
        assert_eq!(KernelLogLevel::Error as u8, u8::from(aya_log::Level::Error));
        assert_eq!(KernelLogLevel::Debug as u8, u8::from(aya_log::Level::Debug));
        assert_eq!(KernelLogLevel::Trace as u8, u8::from(aya_log::Level::Trace));
    }
}
