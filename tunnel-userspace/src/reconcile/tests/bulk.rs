//! The first pass, which is made with few calls.

use super::*;

const SERVICES: [(&str, u8, &[u8]); 4] = [
    ("a", 1, &[1, 2]),
    ("b", 2, &[2, 3, 4, 5]),
    ("c", 3, &[]),
    ("d", 4, &[6]),
];

fn all() -> Vec<(&'static str, Option<ServiceState>)> {
    SERVICES
        .map(|(name, vip, endpoints)| set(name, vip, endpoints))
        .into()
}

/// Whether every Service leads to its endpoints, and to those only.
fn is_whole(reconciler: &Reconciler<Memory>) -> bool {
    let mut all = SERVICES.iter();
    all.all(|(_, vip, endpoints)| backends(reconciler, *vip).as_deref() == Some(*endpoints))
}

#[test]
fn many_services_are_written_as_a_few_are() {
    let mut at_once = adopt(Memory::new(ROOMY));
    apply(&mut at_once, all());
    let mut each = serving(ROOMY, []);
    for service in all() {
        apply(&mut each, vec![service]);
    }

    assert!(is_whole(&at_once));
    assert_eq!(at_once.maps().svc.len(), each.maps().svc.len());
    assert_eq!(at_once.maps().writes, each.maps().writes);
}

/// The first life of a process, of which writes were refused after so many, and then no more.
fn refused_after(limit: usize, maps: Memory) -> Reconciler<Memory> {
    let mut reconciler = adopt(maps);
    reconciler.sync.ports.maps.limit = limit;
    apply(&mut reconciler, all());
    assert!(reconciler.sync.is_in_doubt(), "after {limit} writes");
    assert!(reconciler.is_dirty());
    let writes = reconciler.maps().writes;

    // Nothing is written before it is known what is there.
    reconciler.sync.ports.maps.limit = usize::MAX;
    settle(&mut reconciler);
    assert_eq!(reconciler.maps().writes, writes);
    reconciler.sync.begin_anew(&NoGrace).expect("read");
    reconciler.sync.ports.maps.grace();
    settle(&mut reconciler);
    assert!(!reconciler.sync.is_in_doubt() && !reconciler.is_dirty());
    reconciler
}

#[test]
fn a_write_that_is_refused_among_many_is_found_and_made_again() {
    let mut whole = adopt(Memory::new(ROOMY));
    apply(&mut whole, all());

    for limit in 0..whole.maps().writes {
        let mut reconciler = refused_after(limit, Memory::new(ROOMY));

        assert!(is_whole(&reconciler), "after {limit} writes");
        // It knows what it has: another reading finds the same.
        assert_eq!(reconciler.audit(&NoGrace).expect("read"), 0);
    }
}

/// What an earlier process left: addresses that others have now, and backends that are gone.
fn earlier() -> Memory {
    let first = serving(
        ROOMY,
        [
            set("a", 2, &[1]),
            set("b", 1, &[7, 8]),
            set("old", 9, &[5, 6]),
        ],
    );
    first.sync.ports.maps
}

#[test]
fn what_an_earlier_process_left_is_replaced_though_writes_are_refused() {
    let mut whole = adopt(earlier());
    let before = whole.maps().writes;
    apply(&mut whole, all());

    for limit in before..whole.maps().writes {
        let mut maps = earlier();
        maps.limit = limit;
        let mut reconciler = adopt(maps);
        apply(&mut reconciler, all());
        reconciler.sync.ports.maps.limit = usize::MAX;
        if reconciler.sync.is_in_doubt() {
            reconciler.sync.begin_anew(&NoGrace).expect("read");
            reconciler.sync.ports.maps.grace();
        }
        settle(&mut reconciler);

        assert!(is_whole(&reconciler), "after {limit} writes");
        assert_eq!(backends(&reconciler, 9), None, "after {limit} writes");
        assert_eq!(reconciler.audit(&NoGrace).expect("read"), 0);
    }
}

#[test]
fn what_an_earlier_process_left_stays_through_it_while_the_sources_are_not_whole() {
    let mut reconciler = adopt(earlier());
    reconciler.sync.ports.maps.limit = reconciler.maps().writes + 3;
    reconciler.update(Update {
        whole: false,
        ..update(all())
    });
    settle(&mut reconciler);
    assert!(reconciler.sync.is_in_doubt());

    reconciler.sync.ports.maps.limit = usize::MAX;
    reconciler.sync.begin_anew(&NoGrace).expect("read");
    reconciler.sync.ports.maps.grace();
    settle(&mut reconciler);

    assert_eq!(backends(&reconciler, 9), Some(vec![5, 6]));
    reconciler.update(update(vec![]));
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 9), None);
    assert!(is_whole(&reconciler));
}
