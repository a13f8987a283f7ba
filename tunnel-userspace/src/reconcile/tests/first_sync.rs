//! The first sync, which writes in batches.

use super::*;

const SERVICES: [(&str, u8, &[u8]); 4] = [
    ("a", 1, &[1, 2]),
    ("b", 2, &[2, 3, 4, 5]),
    ("c", 3, &[]),
    ("d", 4, &[6]),
];

fn all() -> Vec<Change<'static>> {
    SERVICES
        .map(|(name, vip, endpoints)| set(name, vip, endpoints))
        .into()
}

/// Returns true if every Service has exactly its endpoints as backends.
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

/// Lets writes succeed again, reads the maps again, and writes the rest.
fn begin_anew(reconciler: &mut Reconciler<Memory>) {
    reconciler.sync.tracked.maps.limit = usize::MAX;
    reconciler.sync.read_again(&NoGrace).expect("read");
    reconciler.sync.tracked.maps.grace();
    settle(reconciler);
}

/// Returns maps of an earlier process, in which Services have other addresses and backends.
fn earlier() -> Memory {
    let (a, b) = (set("a", 2, &[1]), set("b", 1, &[7, 8]));
    let first = serving(ROOMY, [a, b, set("old", 9, &[5, 6])]);
    first.sync.tracked.maps
}

#[test]
fn a_write_that_is_refused_among_many_is_found_and_made_again() {
    for kind in ["new maps", "maps of an earlier process"] {
        let maps = || match kind {
            "new maps" => Memory::new(ROOMY),
            _ => earlier(),
        };
        let mut whole = adopt(maps());
        let before = whole.maps().writes;
        apply(&mut whole, all());

        let mut doubts = 0;
        for limit in before..whole.maps().writes {
            let place = format!("{kind}, after {limit} writes");
            let mut reconciler = adopt(maps());
            reconciler.sync.tracked.maps.limit = limit;
            apply(&mut reconciler, all());
            let is_in_doubt = reconciler.sync.is_content_unknown();
            // With maps of an earlier process, the refused write may be a deletion, which is in no batch.
            let is_left_dirty = is_in_doubt && reconciler.is_dirty();
            assert!(is_left_dirty || kind != "new maps", "{place}");
            let writes = reconciler.maps().writes;
            reconciler.sync.tracked.maps.limit = usize::MAX;
            settle(&mut reconciler);
            if is_in_doubt {
                doubts += 1;
                let made = reconciler.maps().writes;
                assert_eq!(
                    made, writes,
                    "{place}: nothing may be written before the maps are read"
                );
                begin_anew(&mut reconciler);
            }

            assert!(!reconciler.sync.is_content_unknown() && !reconciler.is_dirty());
            assert!(is_whole(&reconciler), "{place}");
            assert_eq!(backends(&reconciler, 9), None, "{place}");
            // The tracked content is right, so an audit finds no difference.
            assert_eq!(audit(&mut reconciler), 0, "{place}");
        }
        assert!(doubts > 0, "{kind}");
    }
}

#[test]
fn what_an_earlier_process_left_stays_through_it_while_the_sources_are_not_whole() {
    let mut reconciler = adopt(earlier());
    reconciler.sync.tracked.maps.limit = reconciler.maps().writes + 3;
    reconciler.update(ClusterUpdate {
        complete: false,
        ..update(all())
    });
    settle(&mut reconciler);
    assert!(reconciler.sync.is_content_unknown());

    begin_anew(&mut reconciler);

    assert_eq!(backends(&reconciler, 9), Some(vec![5, 6]));
    apply(&mut reconciler, Vec::new());
    assert_eq!(backends(&reconciler, 9), None);
    assert!(is_whole(&reconciler));
}
