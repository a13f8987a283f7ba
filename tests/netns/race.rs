//! Races connections, which read the service maps on one CPU, against a writer that changes the maps on
//! another: no connection may reach another Service's backend.

pub(crate) mod fixture;
mod interrupts;
pub(crate) mod map_writers;

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{load::race::Report, load_scale::LoadScale, wait};
use tunnel_userspace::{bpf, model::Family};

use self::{
    fixture::{
        FRONTS, READER_CPU, RaceFixture, SERVICES, UDP_SERVICES, UNEXPECTED_REASONS, WRITER_CPU,
    },
    interrupts::interrupt_cpu,
    map_writers::{DaemonWriter, GracelessWriter, RecordSwapper, pin_to_cpu},
};
use crate::{background_load::expect_all_answered, programs::Programs, support::each_family};

/// The duration of the race against the daemon's writer: twenty times as long as it takes a writer without a
/// grace period to misroute connections.
const RACE_TIME: Duration = Duration::from_secs(10);

/// The time limit for a writer without a grace period to misroute connections.
const FAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The number of misrouted connections that proves that a writer is faulty.
const MIN_MISROUTED: u64 = 3;

/// The time for which a reader checks the final maps, once the writer without a grace period has stopped.
const CHECK_TIME: Duration = Duration::from_millis(300);

/// The duration, for each address family, of the race against a writer that replaces frontend entries.
const SWAP_TIME: Duration = Duration::from_secs(3);

/// The minimum number of endpoint changes per second.
const CHANGES: u32 = 1000;

/// The minimum number of connections per second. Without emulation, about three times as many are made.
const CONNECTS: u32 = 20_000;

/// At most one in this many datagrams may be refused even though a server listens on the port: the kernel's
/// UDP socket lookup fails if a concurrent connect() moves the socket being visited to another hash chain
/// ([`udp_lib_rehash`](https://github.com/torvalds/linux/blob/v6.12/net/ipv4/udp.c)). Even with no program
/// attached, this happens once in 800,000 datagrams at full speed, and more often with a small hash table.
const DATAGRAMS_PER_REFUSAL: u64 = 1000;

/// The number of HTTP requests per second to each Service that serves HTTP.
const REQUESTS: u32 = 250;

/// Held by each race while it runs, so that only one runs at a time: a race needs both CPUs.
static CPUS: Mutex<()> = Mutex::new(());

#[test]
fn endpoint_churn_fails_no_connect_and_leads_none_to_another_service() -> Result<()> {
    each_family(race_with_churn)
}

fn race_with_churn(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let scale = LoadScale::from_environment();
    let duration = scale.duration(RACE_TIME);
    let fixture = RaceFixture::new(family)?;
    let (programs, maps) = Programs::load(&fixture.node, bpf::probe()?, FRONTS)?;
    let writer = DaemonWriter::new(&programs, maps, family)?;
    programs.attach(&fixture.node)?;

    let ended = run_race(
        |stop| writer.run(1, stop),
        || run_readers(&fixture, scale, duration),
    );

    let counts = fixture.counts()?;
    let unexpected =
        UNEXPECTED_REASONS.map(|reason| programs.reason(reason).map(|count| (reason, count)));
    let unexpected = unexpected.into_iter().collect::<Result<Vec<_>>>()?;
    let ((), (changes, stats)) = ended.with_context(|| format!("{unexpected:?}, {counts:?}"))?;
    ensure!(counts.answered > 0 && counts.foreign == 0, "{counts:?}");
    ensure!(
        unexpected.iter().all(|(_, count)| *count == 0),
        "{unexpected:?}"
    );
    ensure!(stats.problems.is_empty(), "{stats:?}");
    expect_rate(changes, scale.count(CHANGES), duration).context("changes")
}

/// Runs `write` on the writer's CPU while `read` runs, and keeps interrupting the readers' CPU. Returns the
/// results of both.
fn run_race<R, W: Send>(
    write: impl FnOnce(&AtomicBool) -> Result<W> + Send,
    read: impl FnOnce() -> Result<R>,
) -> Result<(R, W)> {
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(move || {
            pin_to_cpu(WRITER_CPU)?;
            write(stop)
        });
        let interrupting = scope.spawn(|| interrupt_cpu(READER_CPU, stop));
        let read = read();
        stop.store(true, Ordering::Relaxed);
        interrupting.join().ok().context("a thread panicked")??;
        let written = writer.join().ok().context("the writer panicked")?;
        Ok((read?, written?))
    })
}

/// Runs readers of every kind. None of their connections may fail or be misrouted.
fn run_readers(fixture: &RaceFixture, scale: LoadScale, duration: Duration) -> Result<()> {
    let readers = [
        fixture.reader(READER_CPU, duration)?,
        fixture.reader(WRITER_CPU, duration)?,
        fixture.reconnecting_reader(WRITER_CPU, duration)?,
    ];
    let requests = (UDP_SERVICES..SERVICES)
        .map(|service| fixture.requests(service, scale.count(REQUESTS), duration))
        .collect::<Result<Vec<_>>>()?;
    let mut read = Report::default();
    for reader in readers {
        read.merge(&reader.finish()?);
    }
    for load in requests {
        expect_all_answered(&load.finish()?)?;
    }
    ensure!(read.failures.is_empty() && read.astray == 0, "{read:?}");
    ensure!(
        read.refused * DATAGRAMS_PER_REFUSAL <= read.sent,
        "{read:?}"
    );
    expect_rate(read.connects, scale.count(CONNECTS), duration).context("connects")
}

/// Asserts that at least `rate` events per second occurred. Both `rate` and `duration` have already been
/// scaled.
fn expect_rate(count: u64, rate: u32, duration: Duration) -> Result<()> {
    let wanted = u128::from(rate) * duration.as_millis() / 1000;
    ensure!(
        u128::from(count) >= wanted,
        "{count}, expected at least {wanted}"
    );
    Ok(())
}

#[test]
fn a_frontend_is_found_while_its_entry_in_a_hash_chain_is_replaced() -> Result<()> {
    each_family(race_with_swaps)
}

fn race_with_swaps(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let duration = LoadScale::from_environment().duration(SWAP_TIME);
    let fixture = RaceFixture::new(family)?;
    let (programs, maps) = Programs::load(&fixture.node, bpf::probe()?, RecordSwapper::FRONTS)?;
    let swapper = RecordSwapper::new(maps, family)?;
    programs.attach(&fixture.node)?;

    let (read, rounds) = run_race(
        |stop| swapper.run(stop),
        || fixture.reader(READER_CPU, duration)?.finish(),
    )?;

    ensure!(rounds > 0 && read.connects > 0, "{rounds} rounds, {read:?}");
    ensure!(read.failures.is_empty() && read.astray == 0, "{read:?}");
    Ok(())
}

#[test]
fn a_writer_that_reuses_replaced_entries_at_once_misroutes_connects() -> Result<()> {
    each_family(race_without_grace)
}

fn race_without_grace(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let scale = LoadScale::from_environment();
    let longest = scale.timeout(FAULT_TIMEOUT);
    let fixture = RaceFixture::new(family)?;
    let (programs, maps) = Programs::load(&fixture.node, bpf::probe()?, FRONTS)?;
    let writer = GracelessWriter::new(maps, family)?;
    programs.attach(&fixture.node)?;

    let ((), changes) = run_race(
        |stop| writer.run(1, stop),
        || {
            let _readers = [READER_CPU, WRITER_CPU].map(|cpu| fixture.reader(cpu, longest));
            wait::until(FAULT_TIMEOUT, || {
                fixture
                    .counts()
                    .is_ok_and(|counts| counts.foreign >= MIN_MISROUTED)
            })
        },
    )?;
    ensure!(changes > 0, "the writer changed nothing");

    // The final maps misroute no connections, so the misrouted ones were caused by the writes.
    let read = fixture
        .reader(READER_CPU, scale.duration(CHECK_TIME))?
        .finish()?;
    ensure!(read.connects > 0 && read.astray == 0, "{read:?}");
    ensure!(read.failures.is_empty(), "{read:?}");
    Ok(())
}
