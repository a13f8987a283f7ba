//! Fixtures that the tests of a module share. The first test creates the fixture, later tests reuse it, and
//! it is dropped when tests of another module create theirs.
//!
//! A failing test may leave the fixture in any state. A fixture is therefore reused only if the test
//! explicitly gives it back; after an error or a panic, the next test creates a new one.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;

/// A fixture that several tests use, one after another.
pub trait Fixture: Send + Sync + Sized + 'static {
    /// Undoes a test's changes. If this fails, the fixture isn't reused.
    fn restore(&self) -> Result<()> {
        Ok(())
    }
}

/// A fixture that the tests of a module share, one at a time.
#[derive(Debug)]
pub struct SharedFixture<T> {
    create: fn() -> Result<T>,
    fixture: Mutex<Option<Arc<T>>>,
}

/// The most recently created shared fixture. If it still exists when the process exits, the sweeper removes
/// it.
static LAST: Mutex<Option<&'static dyn Retire>> = Mutex::new(None);

/// A shared fixture of any type that can be dropped.
trait Retire: Sync {
    fn retire(&self);
}

impl<T: Fixture> SharedFixture<T> {
    /// Creates a shared fixture, which `create` constructs on first use.
    #[must_use]
    pub const fn new(create: fn() -> Result<T>) -> Self {
        Self {
            create,
            fixture: Mutex::new(None),
        }
    }

    /// Waits for exclusive access to the fixture, and creates it if it doesn't exist.
    pub fn lease(&'static self) -> Result<Lease<T>> {
        let mut slot = lock(&self.fixture);
        let fixture = match slot.take() {
            Some(fixture) => fixture,
            None => {
                let last = lock(&LAST).replace(self);
                if let Some(last) = last.filter(|last| !is_same(*last, self)) {
                    last.retire();
                }
                Arc::new((self.create)()?)
            }
        };
        Ok(Lease { fixture, slot })
    }
}

fn is_same(one: &dyn Retire, other: &dyn Retire) -> bool {
    std::ptr::addr_eq(one, other)
}

impl<T: Fixture> Retire for SharedFixture<T> {
    /// Waits until no test is using the fixture, then drops it.
    fn retire(&self) {
        drop(lock(&self.fixture).take());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A test's exclusive access to a shared fixture.
#[derive(Debug)]
pub struct Lease<T: 'static> {
    // Declared before the lock, so that it is dropped before the next test can create another fixture.
    fixture: Arc<T>,
    slot: MutexGuard<'static, Option<Arc<T>>>,
}

impl<T: Fixture> Lease<T> {
    /// Gives the fixture back for the next test. A test that succeeds calls this last.
    pub fn give_back(mut self) -> Result<()> {
        self.fixture.restore()?;
        *self.slot = Some(Arc::clone(&self.fixture));
        Ok(())
    }
}

impl<T> Deref for Lease<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.fixture
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::catch_unwind,
        sync::atomic::{AtomicU32, Ordering},
    };

    use anyhow::bail;

    use super::*;

    static CREATED: AtomicU32 = AtomicU32::new(0);
    static EXISTING: AtomicU32 = AtomicU32::new(0);
    static ONE: SharedFixture<Numbered> = SharedFixture::new(Numbered::new);
    static OTHER: SharedFixture<Numbered> = SharedFixture::new(Numbered::new);

    #[derive(Debug)]
    struct Numbered {
        number: u32,
        damaged: Mutex<bool>,
    }

    impl Numbered {
        fn new() -> Result<Self> {
            EXISTING.fetch_add(1, Ordering::Relaxed);
            Ok(Self {
                number: CREATED.fetch_add(1, Ordering::Relaxed),
                damaged: Mutex::default(),
            })
        }
    }

    impl Fixture for Numbered {
        fn restore(&self) -> Result<()> {
            if *lock(&self.damaged) {
                bail!("damaged");
            }
            Ok(())
        }
    }

    impl Drop for Numbered {
        fn drop(&mut self) {
            EXISTING.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_fixture_is_reused_until_a_test_fails_or_another_module_creates_its_own() {
        let number = |shared: &'static SharedFixture<Numbered>| {
            let lease = shared.lease().unwrap();
            let number = lease.number;
            lease.give_back().unwrap();
            number
        };
        assert_eq!([number(&ONE), number(&ONE)], [0, 0]);

        drop(ONE.lease().unwrap());
        assert_eq!(number(&ONE), 1, "a test that failed");
        catch_unwind(|| {
            let _lease = ONE.lease().unwrap();
            panic!("a test that panics");
        })
        .unwrap_err();
        assert_eq!(number(&ONE), 2);
        let lease = ONE.lease().unwrap();
        *lock(&lease.damaged) = true;
        lease.give_back().unwrap_err();
        assert_eq!(number(&ONE), 3);

        assert_eq!([number(&OTHER), number(&OTHER)], [4, 4]);
        assert_eq!(EXISTING.load(Ordering::Relaxed), 1, "the first is dropped");
        assert_eq!(number(&ONE), 5);
    }
}
