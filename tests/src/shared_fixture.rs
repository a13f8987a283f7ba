//! Fixtures that are shared by the tests in a module. The first test creates the fixture, and later tests
//! reuse it. It is dropped when a test in another module creates a different one.
//!
//! A failed test may leave its fixture in any state. So a fixture is reused only if the previous test
//! explicitly gave it back; after an error or a panic, the next test creates a new one.

use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;

/// A fixture that several tests use, one after another.
pub trait Fixture: Send + Sync + Sized + 'static {
    /// Undoes the changes that a test made. If this fails, the fixture isn't reused.
    fn restore(&self) -> Result<()> {
        Ok(())
    }
}

/// A fixture that is shared by the tests in a module, which use it one at a time.
#[derive(Debug)]
pub struct SharedFixture<T> {
    create: fn() -> Result<T>,
    fixture: Mutex<Option<Arc<T>>>,
}

/// The shared fixture that was created last. If it still exists when the process exits, the sweeper removes
/// its lab.
static LAST: Mutex<Option<&'static dyn Retire>> = Mutex::new(None);

/// A shared fixture of any type, which can be dropped.
trait Retire: Sync {
    fn retire(&self);
}

impl<T: Fixture> SharedFixture<T> {
    /// Creates a shared fixture that calls `create` on first use.
    #[must_use]
    pub const fn new(create: fn() -> Result<T>) -> Self {
        Self {
            create,
            fixture: Mutex::new(None),
        }
    }

    /// Waits for exclusive access to the fixture, and creates the fixture if it doesn't exist.
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

/// Exclusive access to a shared fixture, held by one test.
#[derive(Debug)]
pub struct Lease<T: 'static> {
    // This field comes before the lock, so that it is dropped before the next test can create another
    // fixture.
    fixture: Arc<T>,
    slot: MutexGuard<'static, Option<Arc<T>>>,
}

impl<T: Fixture> Lease<T> {
    /// Gives the fixture back, so that the next test can reuse it. A test calls this as its last step.
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
