//! The limit on the bytes that all streams of a process buffer for slow receivers.
//!
//! Each session may use half of what the other sessions leave free. A session that uses more reduces the windows of
//! its streams, and takes bytes from its sockets only in small amounts. No stream ever waits for another one: each of
//! them may always buffer [`FLOOR`] bytes.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Waker,
    time::Duration,
};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use tunnel_common::reason::Reason;

/// The number of bytes that each direction of a stream may buffer even if the limit has been reached.
const FLOOR: usize = 16 << 10;
/// At this multiple of the limit, streams of sessions that use at least one of [`BIG_PART`] parts of all buffered bytes
/// are reset, since their peers do not obey the windows that were reduced.
const BIG_LIMIT: usize = 2;
const BIG_PART: usize = 8;
/// At this multiple of the limit, streams of any session beyond its share are reset.
const HARD_LIMIT: usize = 4;
/// The interval between checks whether reduced windows can be enlarged again.
pub(super) const RECOVERY_INTERVAL: Duration = Duration::from_secs(1);

/// The limit on buffered bytes, and the number of bytes that are buffered in the process.
#[derive(Debug)]
pub(super) struct MemoryBudget {
    max: usize,
    used: AtomicUsize,
}

/// The bytes that the streams of one session have buffered.
#[derive(Debug)]
pub(super) struct SessionMemory {
    budget: Arc<MemoryBudget>,
    used: AtomicUsize,
    /// Notified when the session uses more than its share.
    exceeded: Notify,
    /// The number of times that windows have been reduced.
    reductions: AtomicUsize,
    /// The number of open streams.
    open: AtomicUsize,
    /// The open streams.
    streams: Mutex<HashMap<usize, Arc<QueuedBytes>>>,
}

impl MemoryBudget {
    pub(super) const fn new(max: usize) -> Self {
        Self {
            max,
            used: AtomicUsize::new(0),
        }
    }

    /// Returns true if so much of the limit is used that clients with many streams get no more. A single node with
    /// two sessions can use three quarters.
    pub(super) fn is_scarce(&self) -> bool {
        self.used.load(Ordering::Relaxed) >= self.max / 8 * 5
    }
}

impl Default for MemoryBudget {
    /// Returns a budget that is never used up.
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl SessionMemory {
    pub(super) fn new(budget: Arc<MemoryBudget>) -> Self {
        Self {
            budget,
            used: AtomicUsize::new(0),
            exceeded: Notify::new(),
            reductions: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            streams: Mutex::default(),
        }
    }

    /// Returns how many bytes the session may buffer: half of what the other sessions leave free.
    fn share(&self) -> usize {
        let others = self.budget.used.load(Ordering::Relaxed);
        let others = others.saturating_sub(self.used.load(Ordering::Relaxed));
        self.budget.max.saturating_sub(others) / 2
    }

    /// Returns true if the session buffers more than its share, and more than [`FLOOR`] bytes for each stream.
    pub(super) fn exceeds_share(&self) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        used > self.share() && used > FLOOR * self.open.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.budget.used.fetch_add(bytes, Ordering::Relaxed);
        self.used.fetch_add(bytes, Ordering::Relaxed);
        if self.exceeds_share() {
            self.exceeded.notify_one();
        }
    }

    fn remove(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Waits until the streams of the session need another window than `current`, and returns it. `full` is the
    /// window from the config. The window is enlarged at the earliest at `may_grow_at`.
    pub(super) async fn window_changed(
        &self,
        current: u32,
        full: u32,
        may_grow_at: Instant,
    ) -> u32 {
        loop {
            let desired = self.window(current, full);
            // Otherwise, a session that often exceeds its share would send so many changes that its peer ends it.
            if desired < current || desired > current && Instant::now() >= may_grow_at {
                return desired;
            }
            let exceeded = self.exceeded.notified();
            if current < full {
                drop(timeout(RECOVERY_INTERVAL, exceeded).await);
            } else {
                exceeded.await;
            }
        }
    }

    /// Makes all streams send a WINDOW_UPDATE frame if they must. If the peer has used up a reduced window, `h2` sends
    /// none by itself before more bytes arrive.
    pub(super) fn update_windows(&self) {
        self.reductions.fetch_add(1, Ordering::Release);
        for stream in self.streams.lock().values() {
            stream.task.wake();
        }
    }

    /// Returns the window that streams should have. If the session exceeds its share, all streams together can fill
    /// only half of the share again.
    fn window(&self, current: u32, full: u32) -> u32 {
        let (used, share) = (self.used.load(Ordering::Relaxed), self.share());
        let window = (share / self.open.load(Ordering::Relaxed).max(1) / 2).max(FLOOR);
        // A power of two, so that the windows don't change with each stream.
        let window = 1_u32.checked_shl(window.ilog2()).unwrap_or(full).min(full);
        if self.exceeds_share() {
            window.min(current)
        } else if used <= share / 2 {
            let is_free = share >= self.budget.max / 4;
            if is_free { full } else { window.max(current) }
        } else {
            current
        }
    }
}

/// The received bytes that one stream has buffered for its socket. They no longer count when the value is dropped.
#[derive(Debug)]
pub(super) struct ReceivedBytes {
    session: Arc<SessionMemory>,
    held: usize,
}

impl ReceivedBytes {
    pub(super) const fn new(session: Arc<SessionMemory>) -> Self {
        Self { session, held: 0 }
    }

    /// Records how many bytes the stream has buffered. Returns the reason to reset the stream if the peer does not
    /// obey the reduced windows.
    pub(super) fn set(&mut self, held: usize) -> Result<(), Reason> {
        if held > self.held {
            self.session.add(held - self.held);
        } else if held < self.held {
            self.session.remove(self.held - held);
        }
        let has_grown = held > self.held;
        self.held = held;
        let budget = &self.session.budget;
        let all = budget.used.load(Ordering::Relaxed);
        let is_big = self.session.used.load(Ordering::Relaxed) >= all / BIG_PART;
        let is_beyond = has_grown
            && held > FLOOR
            && (all / BIG_LIMIT >= budget.max && is_big || all / HARD_LIMIT >= budget.max)
            && self.session.exceeds_share();
        if is_beyond {
            Err(Reason::MemoryLimit)
        } else {
            Ok(())
        }
    }
}

impl Drop for ReceivedBytes {
    fn drop(&mut self) {
        self.session.remove(self.held);
    }
}

/// The bytes of one stream that wait to be sent to the peer.
#[derive(Debug)]
pub(super) struct SendQueue {
    queued: Arc<QueuedBytes>,
    /// The last reduction of windows that the stream knows.
    reductions: usize,
}

#[derive(Debug)]
struct QueuedBytes {
    session: Arc<SessionMemory>,
    count: AtomicUsize,
    /// True if the stream waits until bytes have been sent.
    is_waiting: AtomicBool,
    /// The stream's task, which is woken when windows have been reduced, and when bytes for which it waits have been
    /// sent. Otherwise, it would be woken for each frame.
    task: AtomicWaker,
}

impl SendQueue {
    pub(super) fn new(session: Arc<SessionMemory>) -> Self {
        let reductions = session.reductions.load(Ordering::Acquire);
        let queued = Arc::new(QueuedBytes {
            session,
            count: AtomicUsize::new(0),
            is_waiting: AtomicBool::new(false),
            task: AtomicWaker::new(),
        });
        let mut streams = queued.session.streams.lock();
        streams.insert(key(&queued), Arc::clone(&queued));
        queued.session.open.store(streams.len(), Ordering::Relaxed);
        drop(streams);
        Self { queued, reductions }
    }

    /// Counts bytes until they have been sent, or are dropped for another reason.
    pub(super) fn count(&self, bytes: Bytes) -> Bytes {
        self.queued.count.fetch_add(bytes.len(), Ordering::Relaxed);
        self.queued.session.add(bytes.len());
        let queue = Arc::clone(&self.queued);
        Bytes::from_owner(CountedBytes { bytes, queue })
    }

    /// Returns true if windows have been reduced since the last call. The task is woken by the next reduction, and
    /// when bytes for which [`Self::read_limit`] makes it wait have been sent.
    pub(super) fn must_update_window(&mut self, task: &Waker) -> bool {
        // Registered before the checks, so that nothing in between is missed.
        self.queued.task.register(task);
        let reductions = self.queued.session.reductions.load(Ordering::Acquire);
        std::mem::replace(&mut self.reductions, reductions) != reductions
    }

    /// Returns the maximum number of bytes that may be read next, or `None` if the stream must wait until bytes that
    /// it has queued are sent.
    pub(super) fn read_limit(&self) -> Option<usize> {
        if !self.queued.session.exceeds_share() {
            return Some(usize::MAX);
        }
        // Set before the check, so that bytes that are sent meanwhile wake the task.
        self.queued.is_waiting.store(true, Ordering::SeqCst);
        (self.queued.count.load(Ordering::SeqCst) < FLOOR).then_some(FLOOR)
    }
}

impl Drop for SendQueue {
    fn drop(&mut self) {
        let mut streams = self.queued.session.streams.lock();
        streams.remove(&key(&self.queued));
        self.queued
            .session
            .open
            .store(streams.len(), Ordering::Relaxed);
    }
}

/// Returns a stream's key in the list of its session's streams.
fn key(queued: &Arc<QueuedBytes>) -> usize {
    Arc::as_ptr(queued).addr()
}

/// Bytes that are counted until they are dropped.
struct CountedBytes {
    bytes: Bytes,
    queue: Arc<QueuedBytes>,
}

impl AsRef<[u8]> for CountedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        let length = self.bytes.len();
        self.queue.session.remove(length);
        self.queue.count.fetch_sub(length, Ordering::SeqCst);
        if self.queue.is_waiting.swap(false, Ordering::SeqCst) {
            self.queue.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    const MIB: usize = 1 << 20;
    const FULL: u32 = 1 << 20;

    /// Counts the calls of a waker.
    #[derive(Default)]
    struct WakeCount(AtomicUsize);

    impl Wake for WakeCount {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn session(budget: &Arc<MemoryBudget>) -> Arc<SessionMemory> {
        Arc::new(SessionMemory::new(Arc::clone(budget)))
    }

    fn received(session: &Arc<SessionMemory>) -> ReceivedBytes {
        ReceivedBytes::new(Arc::clone(session))
    }

    #[test]
    fn a_session_gets_half_of_what_the_others_leave_and_leaves_the_rest() {
        let budget = Arc::new(MemoryBudget::new(64 * MIB));
        let [first, second] = [(); 2].map(|()| session(&budget));
        let (mut one, mut two) = (received(&first), received(&second));

        assert_eq!(one.set(32 * MIB), Ok(()));
        assert!(!first.exceeds_share());
        assert_eq!(one.set(33 * MIB), Ok(()));
        assert!(first.exceeds_share() && !second.exceeds_share());
        assert_eq!(two.set(15 * MIB), Ok(()));
        assert!(!second.exceeds_share());
        assert!(budget.is_scarce());
        assert_eq!(two.set(17 * MIB), Ok(()));
        assert!(second.exceeds_share());

        drop((one, two));
        assert!(!budget.is_scarce() && !first.exceeds_share());
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn windows_shrink_beyond_the_share_and_recover() {
        let budget = Arc::new(MemoryBudget::new(64 * MIB));
        let session = session(&budget);
        session.open.store(100, Ordering::Relaxed);
        let mut bytes = received(&session);

        bytes.set(32 * MIB).expect("below the limit");
        assert_eq!(session.window(FULL, FULL), FULL);
        bytes.set(33 * MIB).expect("below the limit");
        assert_eq!(session.window(FULL, FULL), 128 << 10);
        assert_eq!(session.window(64 << 10, FULL), 64 << 10, "no larger");
        bytes.set(17 * MIB).expect("below the limit");
        assert_eq!(session.window(128 << 10, FULL), 128 << 10, "not yet");
        bytes.set(16 * MIB).expect("below the limit");
        assert_eq!(session.window(128 << 10, FULL), FULL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_learns_when_its_windows_must_change() {
        let budget = Arc::new(MemoryBudget::new(64 * MIB));
        let session = session(&budget);
        session.open.store(100, Ordering::Relaxed);
        let changed = |current| session.window_changed(current, FULL, Instant::now());
        timeout(Duration::from_secs(60), changed(FULL))
            .await
            .expect_err("nothing is buffered");

        let mut bytes = received(&session);
        bytes.set(33 * MIB).expect("below the limit");
        assert_eq!(changed(FULL).await, 128 << 10);
        timeout(Duration::from_secs(60), changed(128 << 10))
            .await
            .expect_err("still buffered");
        drop(bytes);
        assert_eq!(changed(128 << 10).await, FULL);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_beside_a_full_budget_keeps_a_small_window_and_its_streams() {
        let budget = Arc::new(MemoryBudget::new(64 * MIB));
        let [hostile, honest] = [(); 2].map(|()| session(&budget));
        let mut stalled = received(&hostile);
        let _stream = SendQueue::new(Arc::clone(&honest));
        let mut bytes = received(&honest);
        stalled.set(127 * MIB).expect("below the limit");

        // A message arrives and is written, many times.
        let (mut window, mut changes) = (FULL, 0);
        let mut may_grow_at = Instant::now();
        for held in [1000, 40_000, 0].into_iter().cycle().take(3000) {
            bytes.set(held).expect("the hostile session is reset first");
            let changed = honest.window_changed(window, FULL, may_grow_at);
            if let Ok(new) = timeout(Duration::from_millis(1), changed).await {
                (window, changes) = (new, changes + 1);
                may_grow_at = Instant::now() + RECOVERY_INTERVAL;
            }
        }
        assert!(changes <= 7, "{changes} changes");
        stalled.set(129 * MIB).expect_err("it is the largest");
        bytes.set(40_000).expect("the others go on");
        stalled.set(300 * MIB).expect_err("it is the largest");
        bytes.set(50_000).expect_err("nobody may buffer more");
    }

    #[test]
    fn a_stream_is_reset_if_the_peer_ignores_the_reduced_windows() {
        let budget = Arc::new(MemoryBudget::new(64 * MIB));
        let session = session(&budget);
        let (mut big, mut small) = (received(&session), received(&session));
        assert_eq!(small.set(10), Ok(()));
        assert_eq!(big.set(100 * MIB), Ok(()));
        assert_eq!(big.set(128 * MIB), Err(Reason::MemoryLimit));

        assert_eq!(small.set(FLOOR), Ok(()), "the others go on");
        assert_eq!(big.set(127 * MIB), Ok(()), "its bytes are written");
    }

    #[test]
    fn each_stream_learns_once_that_windows_have_been_reduced() {
        let session = session(&Arc::default());
        let mut stream = SendQueue::new(Arc::clone(&session));
        assert!(!stream.must_update_window(Waker::noop()));

        session.update_windows();
        assert!(stream.must_update_window(Waker::noop()));
        assert!(!stream.must_update_window(Waker::noop()));
        let mut new = SendQueue::new(session);
        assert!(!new.must_update_window(Waker::noop()));
    }

    #[test]
    fn a_stream_of_a_session_beyond_its_share_waits_only_for_its_own_bytes() {
        let budget = Arc::new(MemoryBudget::new(64 * MIB));
        let session = session(&budget);
        let [mut full, other] = [(); 2].map(|()| SendQueue::new(Arc::clone(&session)));
        assert_eq!(full.read_limit(), Some(usize::MAX));
        let woken = Arc::new(WakeCount::default());
        full.must_update_window(&Arc::clone(&woken).into());

        drop(full.count(vec![0; MIB].into()));
        assert_eq!(woken.0.load(Ordering::Relaxed), 0, "it doesn't wait");
        let queued = full.count(vec![0; 33 * MIB].into());
        assert_eq!(session.streams.lock().len(), 2);
        assert_eq!(full.read_limit(), None);
        assert_eq!(other.read_limit(), Some(FLOOR));
        drop(queued);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert_eq!(full.read_limit(), Some(usize::MAX));
        drop((full, other));
        assert!(session.streams.lock().is_empty());
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }
}
