//! Restarts of the daemon with maps left by an earlier process.

use super::{
    Arc, Change, ClusterUpdate, MapSize, Memory, ROOMY, Reason, Reconciler, adopt, apply, audit,
    backends, problem, serving, set, settle, update, vip,
};
use crate::model::TrafficPolicy;

/// Returns a reconciler that has just been restarted. Before the restart, it served `web` and `dns`.
fn restarted() -> Reconciler<Memory> {
    let first = serving(ROOMY, [set("web", 1, &[1, 2]), set("dns", 2, &[3])]);
    adopt(first.sync.tracked.maps)
}

/// Applies changes to Services while an object is missing from the sources.
fn apply_incomplete(second: &mut Reconciler<Memory>, services: Vec<Change<'_>>) {
    second.update(ClusterUpdate {
        complete: false,
        ..update(services)
    });
    settle(second);
}

#[test]
fn entries_stay_while_objects_are_missing_even_if_an_audit_finds_differences() {
    let mut second = restarted();
    apply_incomplete(&mut second, vec![set("web", 1, &[1, 2])]);
    second.sync.tracked.maps.frontend_keys.remove(&vip(1));

    assert!(audit(&mut second) > 0);
    assert_eq!(backends(&second, 1), Some(vec![1, 2]));
    assert_eq!(backends(&second, 2), Some(vec![3]));

    apply(&mut second, Vec::new());
    assert_eq!(backends(&second, 2), None);
}

#[test]
fn a_service_with_a_repaired_manifest_adopts_its_entries() {
    let mut second = restarted();
    apply_incomplete(&mut second, vec![set("web", 1, &[1, 2])]);
    let before = second.maps().writes;

    apply(&mut second, vec![set("dns", 2, &[3])]);

    assert_eq!(second.maps().writes, before);
    assert_eq!(backends(&second, 2), Some(vec![3]));
}

#[test]
fn backends_stay_while_their_slice_may_be_missing() {
    let mut second = restarted();
    apply_incomplete(&mut second, vec![set("web", 1, &[]), set("dns", 2, &[3])]);
    assert_eq!(backends(&second, 1), Some(vec![1, 2]));
    // A Service that this process has already served is changed at once.
    apply_incomplete(&mut second, vec![set("dns", 2, &[])]);
    assert_eq!(backends(&second, 2), Some(Vec::new()));

    apply(&mut second, Vec::new());

    assert_eq!(backends(&second, 1), Some(Vec::new()));
}

#[test]
fn a_service_without_room_is_a_problem_even_before_old_entries_are_freed() {
    let services = [set("a", 1, &[1, 2]), set("b", 2, &[3, 4])];
    let mut reconciler = serving(ROOMY.with(MapSize::Slots, 4), services);
    reconciler.update(update(vec![set("a", 1, &[1, 5])]));
    let retired = reconciler.write_changes();
    assert!(!retired.0.is_empty());

    reconciler.update(update(vec![set("c", 3, &[6])]));
    reconciler.write_changes();
    reconciler.update(update(vec![set("b", 2, &[4, 7, 8])]));
    reconciler.write_changes();

    assert_eq!(problem(&reconciler, "c"), Some(Reason::SlotsFull));
    assert_eq!(problem(&reconciler, "b"), Some(Reason::SlotsFull));
    assert_eq!(backends(&reconciler, 2), Some(vec![4, 7]));
}

#[test]
fn a_service_with_policy_local_changes_while_objects_are_missing() {
    let local = |vip: u8, endpoint: u8| {
        let (name, state) = set("web", vip, &[endpoint]);
        let mut state = state.expect("a Service");
        Arc::make_mut(&mut state.service).internal_policy = TrafficPolicy::Local;
        for slice in &mut state.slices {
            for endpoint in &mut Arc::make_mut(slice).endpoints {
                endpoint.node = Some("node-a".into());
            }
        }
        (name, Some(state))
    };
    for vip in [1, 2] {
        let first = serving(ROOMY, [local(vip, 1)]);
        let mut second = adopt(first.sync.tracked.maps);
        apply_incomplete(&mut second, vec![local(vip, 2)]);

        assert_eq!(backends(&second, vip), Some(vec![2]));
    }
}
