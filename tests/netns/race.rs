//! The race between connects, which read the service maps on one CPU, and a writer that changes the maps
//! on the other: no connect may reach another Service's backend.

pub(crate) mod field;
mod hold_up;
pub(crate) mod writers;

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{load::race::Report, scale::Scale, wait};
use tunnel_userspace::{bpf, model::Family};

use self::{
    field::{FRONTS, Field, NEVER, READ, READER, SERVICES, WRITER},
    hold_up::hold_up,
    writers::{Hasty, Product, Swapping, keep_to},
};
use crate::{programs::Programs, support::each_family, under_load::is_answered};

/// The duration of the race with the daemon's writer: twenty times the time in which the writer without
/// a grace period causes misrouted connects.
const LASTING: Duration = Duration::from_secs(10);

/// The time limit for the writer without a grace period to cause misrouted connects.
const LONGEST: Duration = Duration::from_secs(60);

/// The number of misrouted connects that prove the writer's fault.
const PROOF: u64 = 3;

/// The time that a reader checks the maps after the writer without a grace period has stopped.
const AFTERWARDS: Duration = Duration::from_millis(300);

/// The time that frontends' entries are replaced, in each family.
const SWAPPING: Duration = Duration::from_secs(3);

/// The minimum number of endpoint changes per second.
const CHANGES: u32 = 1000;

/// The minimum number of connects per second; without emulation, there are three times as many.
const CONNECTS: u32 = 20_000;

/// One in this many datagrams may be refused, although a server has the port: the kernel's lookup of a
/// UDP socket fails if it is just visiting a socket that a concurrent connect moves to another hash chain
/// ([`udp_lib_rehash`](https://github.com/torvalds/linux/blob/v6.12/net/ipv4/udp.c)). Without any
/// program attached, this happens once in 800,000 datagrams at full speed, and more often with a small
/// hash table.
const SENT_PER_REFUSED: u64 = 1000;

/// HTTP requests per second to each Service of HTTP servers.
const REQUESTS: u32 = 250;

/// A lock, so that only one race runs at a time: each needs both CPUs.
static CPUS: Mutex<()> = Mutex::new(());

#[test]
fn endpoint_churn_fails_no_connect_and_leads_none_to_another_service() -> Result<()> {
    each_family(churn)
}

fn churn(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let scale = Scale::from_environment();
    let lasting = scale.lasting(LASTING);
    let field = Field::new(family)?;
    let (programs, maps) = Programs::load(&field.node, bpf::probe()?, FRONTS)?;
    let product = Product::new(&programs, maps, family)?;
    programs.attach(&field.node)?;

    let ended = beside(|stop| product.run(1, stop), || read(&field, scale, lasting));

    let seen = field.seen()?;
    let never = NEVER.map(|reason| programs.reason(reason).map(|count| (reason, count)));
    let never = never.into_iter().collect::<Result<Vec<_>>>()?;
    let ((), (changes, stats)) = ended.with_context(|| format!("{never:?}, {seen:?}"))?;
    ensure!(seen.answered > 0 && seen.foreign == 0, "{seen:?}");
    ensure!(never.iter().all(|(_, count)| *count == 0), "{never:?}");
    ensure!(stats.problems.is_empty(), "{stats:?}");
    at_least(changes, scale.count(CHANGES), lasting).context("changes")
}

/// Runs a writer on its CPU while `read` runs, and interrupts the readers' CPU meanwhile. Returns both
/// results.
fn beside<R, W: Send>(
    write: impl FnOnce(&AtomicBool) -> Result<W> + Send,
    read: impl FnOnce() -> Result<R>,
) -> Result<(R, W)> {
    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(move || {
            keep_to(WRITER)?;
            write(stop)
        });
        let holding = scope.spawn(|| hold_up(READER, stop));
        let read = read();
        stop.store(true, Ordering::Relaxed);
        holding.join().ok().context("a thread panicked")??;
        let written = writer.join().ok().context("the writer panicked")?;
        Ok((read?, written?))
    })
}

/// Runs readers of every kind; no connect may fail or be misrouted.
fn read(field: &Field, scale: Scale, lasting: Duration) -> Result<()> {
    let readers = [
        field.reader(READER, lasting)?,
        field.reader(WRITER, lasting)?,
        field.returning_reader(WRITER, lasting)?,
    ];
    let requests = (READ..SERVICES)
        .map(|service| field.requests(service, scale.count(REQUESTS), lasting))
        .collect::<Result<Vec<_>>>()?;
    let mut read = Report::default();
    for reader in readers {
        read.merge(&reader.finish()?);
    }
    for load in requests {
        is_answered(&load.finish()?)?;
    }
    ensure!(read.failures.is_empty() && read.astray == 0, "{read:?}");
    ensure!(read.refused * SENT_PER_REFUSED <= read.sent, "{read:?}");
    at_least(read.connects, scale.count(CONNECTS), lasting).context("connects")
}

/// Asserts that there were at least `rate` events per second. Both `rate` and `lasting` are already
/// scaled.
fn at_least(count: u64, rate: u32, lasting: Duration) -> Result<()> {
    let wanted = u128::from(rate) * lasting.as_millis() / 1000;
    ensure!(u128::from(count) >= wanted, "{count}, expected at least {wanted}");
    Ok(())
}

#[test]
fn a_front_is_found_while_it_is_replaced_in_a_chain_of_several() -> Result<()> {
    each_family(swap)
}

fn swap(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let lasting = Scale::from_environment().lasting(SWAPPING);
    let field = Field::new(family)?;
    let (programs, maps) = Programs::load(&field.node, bpf::probe()?, Swapping::FRONTS)?;
    let swapping = Swapping::new(maps, family)?;
    programs.attach(&field.node)?;

    let (read, rounds) = beside(
        |stop| swapping.run(stop),
        || field.reader(READER, lasting)?.finish(),
    )?;

    ensure!(rounds > 0 && read.connects > 0, "{rounds} rounds, {read:?}");
    ensure!(read.failures.is_empty() && read.astray == 0, "{read:?}");
    Ok(())
}

#[test]
fn a_writer_that_reuses_at_once_what_it_replaced_leads_connects_astray() -> Result<()> {
    each_family(be_hasty)
}

fn be_hasty(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let scale = Scale::from_environment();
    let longest = scale.patience(LONGEST);
    let field = Field::new(family)?;
    let (programs, maps) = Programs::load(&field.node, bpf::probe()?, FRONTS)?;
    let hasty = Hasty::new(maps, family)?;
    programs.attach(&field.node)?;

    let ((), changes) = beside(
        |stop| hasty.run(1, stop),
        || {
            let _readers = [READER, WRITER].map(|cpu| field.reader(cpu, longest));
            wait::until(LONGEST, || {
                field.seen().is_ok_and(|seen| seen.foreign >= PROOF)
            })
        },
    )?;
    ensure!(changes > 0, "the writer changed nothing");

    // The maps' final content misroutes no connect, so the writes did.
    let read = field.reader(READER, scale.lasting(AFTERWARDS))?.finish()?;
    ensure!(read.connects > 0 && read.astray == 0, "{read:?}");
    ensure!(read.failures.is_empty(), "{read:?}");
    Ok(())
}
