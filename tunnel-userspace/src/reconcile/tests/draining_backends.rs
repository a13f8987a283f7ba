//! Removed backends that still have open connections.

use super::*;

/// Removes endpoints 1 and 2 from a Service while they have the given numbers of open connections. Returns
/// the reconciler and the backend indices of the two endpoints.
fn remove_two_backends(counts: [u64; 2]) -> (Reconciler<Memory>, [u32; 2]) {
    let mut reconciler = serving(ROOMY, [set("web", 1, &[1, 2, 3])]);
    let indices = [1, 2].map(|last| backend_entry(&reconciler, last).0);
    for (index, count) in indices.into_iter().zip(counts) {
        set_open_connections(&reconciler.maps().open_connections, index, count);
    }
    apply(&mut reconciler, vec![set("web", 1, &[3])]);
    (reconciler, indices)
}

#[test]
fn an_index_is_reused_only_after_its_last_connection_has_closed() {
    let (mut reconciler, [first, second]) = remove_two_backends([3, 0]);
    assert_eq!(reconciler.sync.tracked.actual.draining.len(), 1);

    // `Memory` panics if an index that has open connections is written.
    apply(&mut reconciler, vec![set("web", 1, &[3, 4, 5])]);
    let [fourth, fifth] = [4, 5].map(|last| backend_entry(&reconciler, last).0);
    assert!(
        fourth == second || fifth == second,
        "the free index is not reused"
    );
    assert!(fourth != first && fifth != first);

    set_open_connections(&reconciler.maps().open_connections, first, 1);
    reconciler.sync.poll_draining();
    assert_eq!(reconciler.sync.tracked.actual.draining.len(), 1);
    set_open_connections(&reconciler.maps().open_connections, first, 0);
    reconciler.sync.poll_draining();
    assert_eq!(reconciler.sync.tracked.actual.draining.len(), 0);
    apply(&mut reconciler, vec![set("web", 1, &[3, 4, 5, 6])]);
    let (sixth, backend) = backend_entry(&reconciler, 6);
    assert!(sixth == first && backend.state.is_serving());
}

#[test]
fn a_restart_finds_indices_with_open_connections() {
    let (reconciler, [first, second]) = remove_two_backends([1, 2]);

    let mut second_life = adopt(reconciler.sync.tracked.maps);
    assert_eq!(second_life.sync.tracked.actual.draining.len(), 2);
    apply(&mut second_life, vec![set("web", 1, &[3, 4, 5])]);

    for last in [4, 5] {
        let (taken, backend) = backend_entry(&second_life, last);
        assert!(backend.state.is_serving() && taken != first && taken != second);
    }
}

#[test]
fn connections_that_a_running_program_counts_during_the_start_are_seen() {
    /// A program that counts one more connection before the grace period ends.
    struct Counting(OpenConnections, u32);

    impl GracePeriod for Counting {
        fn wait(&self) -> io::Result<()> {
            set_open_connections(&self.0, self.1, 1);
            Ok(())
        }
    }

    let (reconciler, [first, _]) = remove_two_backends([0, 0]);
    assert_eq!(reconciler.sync.tracked.actual.draining.len(), 0);
    let grace = Counting(reconciler.maps().open_connections.clone(), first);
    let second = Reconciler::adopt(reconciler.sync.tracked.maps, ROOMY, &grace, settings());

    assert_eq!(
        second.expect("adopted").sync.tracked.actual.draining.len(),
        1
    );
}

#[test]
fn a_service_without_free_indices_is_retried_when_connections_close() {
    let mut reconciler = adopt(Memory::new(ROOMY.with(MapSize::Backends, 8)));
    // The array has 73 entries, and open connections keep 72 of them from being reused.
    let mut kept = Vec::new();
    for round in 0..9 {
        let endpoints: Vec<u8> = (0..8).map(|number| 10 + 8 * round + number).collect();
        apply(&mut reconciler, vec![set("web", 1, &endpoints)]);
        for last in endpoints {
            let (index, _) = backend_entry(&reconciler, last);
            set_open_connections(&reconciler.maps().open_connections, index, 1);
            kept.push(index);
        }
        apply(&mut reconciler, vec![set("web", 1, &[])]);
    }
    assert_eq!(reconciler.sync.tracked.actual.draining.len(), 72);

    apply(&mut reconciler, vec![set("db", 2, &[1, 2])]);
    let all = &reconciler.sync.problems;
    let problems = all.of_service(&ObjectName::new("default", "db"));
    let problem_of_db = problems.and_then(|ports| ports.values().next());
    let problem_of_db = problem_of_db.expect("no room");
    assert_eq!(problem_of_db.reason, Reason::BackendsFull);
    let text = "use the indices of 72 removed backends, of which 72 were of namespace default";
    assert!(problem_of_db.text.contains(text), "{problem_of_db:?}");
    // One of the two endpoints gets the only free index.
    assert_eq!(backends(&reconciler, 2), Some(vec![1]));

    set_open_connections(&reconciler.maps().open_connections, kept[0], 0);
    reconciler.sync.poll_draining();
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 2), Some(vec![1, 2]));
    assert_eq!(problem(&reconciler, "db"), None);
}
