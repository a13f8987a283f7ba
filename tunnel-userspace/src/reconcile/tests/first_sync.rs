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

/// Returns true if every Service's backends are exactly its endpoints.
fn is_complete(reconciler: &Reconciler<Memory>) -> bool {
    let mut all = SERVICES.iter();
    all.all(|(_, vip, endpoints)| backends(reconciler, *vip).as_deref() == Some(*endpoints))
}

#[test]
fn a_batch_writes_the_same_entries_as_single_writes() {
    let mut at_once = adopt(Memory::new(ROOMY));
    apply(&mut at_once, all());
    let mut each = serving(ROOMY, []);
    for service in all() {
        apply(&mut each, vec![service]);
    }

    assert!(is_complete(&at_once));
    assert_eq!(
        at_once.maps().frontend_keys.len(),
        each.maps().frontend_keys.len()
    );
    assert_eq!(at_once.maps().writes, each.maps().writes);
}

/// Lets writes succeed again, re-reads the maps, and writes the rest.
fn read_again(reconciler: &mut Reconciler<Memory>) {
    reconciler.sync.tracked.maps.max_writes = usize::MAX;
    reconciler.sync.read_again(&NoGrace).expect("read");
    reconciler.sync.tracked.maps.end_grace_period();
    settle(reconciler);
}

/// Returns maps left by an earlier process, in which the Services have different addresses and backends.
fn earlier_maps() -> Memory {
    let (a, b) = (set("a", 2, &[1]), set("b", 1, &[7, 8]));
    let first = serving(ROOMY, [a, b, set("old", 9, &[5, 6])]);
    first.sync.tracked.maps
}

#[test]
fn a_refused_batch_is_repaired() {
    for kind in ["new maps", "maps of an earlier process"] {
        let maps = || match kind {
            "new maps" => Memory::new(ROOMY),
            _ => earlier_maps(),
        };
        let mut complete = adopt(maps());
        let before = complete.maps().writes;
        apply(&mut complete, all());

        let mut refused_batches = 0;
        for limit in before..complete.maps().writes {
            let case = format!("{kind}, after {limit} writes");
            let mut reconciler = adopt(maps());
            reconciler.sync.tracked.maps.max_writes = limit;
            apply(&mut reconciler, all());
            let is_in_doubt = reconciler.sync.is_content_unknown();
            // With maps left by an earlier process, the refused write may be a deletion, which is not part of
            // any batch.
            let is_left_dirty = is_in_doubt && reconciler.is_dirty();
            assert!(is_left_dirty || kind != "new maps", "{case}");
            let writes = reconciler.maps().writes;
            reconciler.sync.tracked.maps.max_writes = usize::MAX;
            settle(&mut reconciler);
            if is_in_doubt {
                refused_batches += 1;
                let made = reconciler.maps().writes;
                assert_eq!(
                    made, writes,
                    "{case}: nothing may be written before the maps are read"
                );
                read_again(&mut reconciler);
            }

            assert!(!reconciler.sync.is_content_unknown() && !reconciler.is_dirty());
            assert!(is_complete(&reconciler), "{case}");
            assert_eq!(backends(&reconciler, 9), None, "{case}");
            // The tracked contents are correct, so an audit finds no differences.
            assert_eq!(audit(&mut reconciler), 0, "{case}");
        }
        assert!(refused_batches > 0, "{kind}");
    }
}

#[test]
fn entries_of_an_earlier_process_survive_a_refused_batch_while_objects_are_missing() {
    let mut reconciler = adopt(earlier_maps());
    reconciler.sync.tracked.maps.max_writes = reconciler.maps().writes + 3;
    reconciler.update(ClusterUpdate {
        complete: false,
        ..update(all())
    });
    settle(&mut reconciler);
    assert!(reconciler.sync.is_content_unknown());

    read_again(&mut reconciler);

    assert_eq!(backends(&reconciler, 9), Some(vec![5, 6]));
    apply(&mut reconciler, Vec::new());
    assert_eq!(backends(&reconciler, 9), None);
    assert!(is_complete(&reconciler));
}
