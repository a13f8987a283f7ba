//! Fixtures that the tests of a module share. The first test creates the fixture, the next ones reuse it,
//! and it is dropped when tests of another module create theirs.
//!
//! A failing test may leave the fixture in any state. Therefore a fixture is reused only if the test
//! returns it explicitly; after an error or a panic, the next test creates a new one.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;

/// A fixture that several tests use, one after another.
pub trait Fixture: Send + Sync + Sized + 'static {
    /// Undoes the changes of a test. If it fails, the fixture is not reused.
    fn restore(&self) -> Result<()> {
        Ok(())
    }
}

/// A fixture that the tests of a module share, one at a time.
#[derive(Debug)]
pub struct Shared<T> {
    make: fn() -> Result<T>,
    fixture: Mutex<Option<Arc<T>>>,
}

/// The shared fixture that was created last. If it still exists when the process ends, the sweeper
/// removes it.
static LAST: Mutex<Option<&'static dyn Retire>> = Mutex::new(None);

/// A shared fixture of any type that can be dropped.
trait Retire: Sync {
    fn retire(&self);
}

impl<T: Fixture> Shared<T> {
    /// Creates a shared fixture that is constructed by `make` on first use.
    #[must_use]
    pub const fn new(make: fn() -> Result<T>) -> Self {
        Self {
            make,
            fixture: Mutex::new(None),
        }
    }

    /// Waits for exclusive access to the fixture; creates a fixture if there is none.
    pub fn take(&'static self) -> Result<Lease<T>> {
        let mut kept = lock(&self.fixture);
        let fixture = match kept.take() {
            Some(fixture) => fixture,
            None => {
                let last = lock(&LAST).replace(self);
                if let Some(last) = last.filter(|last| !is_same(*last, self)) {
                    last.retire();
                }
                Arc::new((self.make)()?)
            }
        };
        Ok(Lease { fixture, kept })
    }
}

fn is_same(one: &dyn Retire, other: &dyn Retire) -> bool {
    std::ptr::addr_eq(one, other)
}

impl<T: Fixture> Retire for Shared<T> {
    /// Waits until no test uses the fixture, then drops it.
    fn retire(&self) {
        drop(lock(&self.fixture).take());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exclusive access of a test to a shared fixture.
#[derive(Debug)]
pub struct Lease<T: 'static> {
    // Declared before the lock, so that it is dropped before the next test can create another one.
    fixture: Arc<T>,
    kept: MutexGuard<'static, Option<Arc<T>>>,
}

impl<T: Fixture> Lease<T> {
    /// Returns the fixture for the next test. A test calls this last, if it succeeds.
    pub fn give_back(mut self) -> Result<()> {
        self.fixture.restore()?;
        *self.kept = Some(Arc::clone(&self.fixture));
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

    static MADE: AtomicU32 = AtomicU32::new(0);
    static HELD: AtomicU32 = AtomicU32::new(0);
    static ONE: Shared<Numbered> = Shared::new(Numbered::new);
    static OTHER: Shared<Numbered> = Shared::new(Numbered::new);

    #[derive(Debug)]
    struct Numbered {
        number: u32,
        damaged: Mutex<bool>,
    }

    impl Numbered {
        fn new() -> Result<Self> {
            HELD.fetch_add(1, Ordering::Relaxed);
            Ok(Self {
                number: MADE.fetch_add(1, Ordering::Relaxed),
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
            HELD.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_fixture_serves_until_a_test_fails_or_another_module_makes_its_own() {
        let number = |shared: &'static Shared<Numbered>| {
            let lease = shared.take().unwrap();
            let number = lease.number;
            lease.give_back().unwrap();
            number
        };
        assert_eq!([number(&ONE), number(&ONE)], [0, 0]);

        drop(ONE.take().unwrap());
        assert_eq!(number(&ONE), 1, "a test that failed");
        catch_unwind(|| {
            let _lease = ONE.take().unwrap();
            panic!("a test that panics");
        })
        .unwrap_err();
        assert_eq!(number(&ONE), 2);
        let lease = ONE.take().unwrap();
        *lock(&lease.damaged) = true;
        lease.give_back().unwrap_err();
        assert_eq!(number(&ONE), 3);

        assert_eq!([number(&OTHER), number(&OTHER)], [4, 4]);
        assert_eq!(HELD.load(Ordering::Relaxed), 1, "the first is dropped");
        assert_eq!(number(&ONE), 5);
    }
}
