//! Interns namespaces, since each one is shared by many objects.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

/// The interned namespaces. Some of them may no longer be in use.
static INTERNED: Mutex<BTreeSet<Arc<str>>> = Mutex::new(BTreeSet::new());

/// Returns the shared string for a namespace, so that equal namespaces always have equal pointers.
///
/// Whenever the number of interned namespaces reaches a power of two, unused ones are removed.
#[must_use]
pub fn intern_namespace(name: &str) -> Arc<str> {
    let mut known = INTERNED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = known.get(name) {
        return Arc::clone(shared);
    }
    if known.len().is_power_of_two() {
        known.retain(|name| Arc::strong_count(name) > 1);
    }
    let shared = Arc::<str>::from(name);
    known.insert(Arc::clone(&shared));
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_stored_once_while_it_is_in_use() {
        let shop = intern_namespace("shop-of-this-test");
        assert!(Arc::ptr_eq(&shop, &intern_namespace("shop-of-this-test")));

        let gone = Arc::downgrade(&intern_namespace("gone-of-this-test"));
        for number in 0..10_000 {
            drop(intern_namespace(&format!("passing-{number}")));
        }

        assert_eq!(gone.strong_count(), 0);
        assert!(Arc::ptr_eq(&shop, &intern_namespace("shop-of-this-test")));
        let known = INTERNED.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(known.len() < 5_000, "{}", known.len());
    }
}
