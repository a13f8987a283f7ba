//! The counters that the BPF programs maintain for service ports.

use tunnel_common::service::ServiceCounts;

use super::*;

/// Returns the id of the service port at a VIP.
fn id(reconciler: &Reconciler<Memory>, last: u8) -> u32 {
    let frontend = &reconciler.sync.tracked.actual.frontends[&vip(last)];
    frontend.record.service
}

/// Writes the given Services and pretends that, for VIP 1, 7 connections were sent to backends and 3 were
/// refused.
fn with_counts<const N: usize>(services: [Change<'_>; N]) -> Reconciler<Memory> {
    let mut reconciler = serving(ROOMY, services);
    let tallied = ServiceCounts {
        sent: 7,
        refused: 3,
        ..ServiceCounts::default()
    };
    let service = id(&reconciler, 1);
    reconciler
        .sync
        .tracked
        .maps
        .service_counts
        .insert(service, tallied);
    reconciler
}

fn port_counters(reconciler: &Reconciler<Memory>, most: usize) -> PortCounterList {
    reconciler
        .published()
        .port_counters(reconciler.maps(), most)
}

/// Returns the published counters for each Service: its name and the numbers of sent, refused and open
/// connections.
fn counters_by_service(reconciler: &Reconciler<Memory>) -> Vec<(String, [u64; 3])> {
    let counters = |port: PortCounters| {
        let name = port.name.service.name.to_string();
        (name, [port.sent, port.refused, port.open])
    };
    let ports = port_counters(reconciler, usize::MAX).ports.into_iter();
    ports.map(counters).collect()
}

#[test]
fn a_service_port_has_its_counters_and_those_of_its_backends() {
    let services = || [set("a", 1, &[1, 2]), set("b", 2, &[1])];
    let reconciler = with_counts(services());
    for index in reconciler.maps().backends.keys() {
        set_open_connections(&reconciler.maps().open_connections, *index, 5);
    }

    let wanted = [("a".to_owned(), [7, 3, 10]), ("b".to_owned(), [0, 0, 5])];
    assert_eq!(counters_by_service(&reconciler), wanted);
    let mut next = adopt(reconciler.sync.tracked.maps);
    apply(&mut next, services().into());
    assert_eq!(counters_by_service(&next), wanted);
}

#[test]
fn a_service_with_a_reused_id_starts_with_counters_of_0() {
    let mut reconciler = with_counts([set("old", 1, &[1])]);
    let old = id(&reconciler, 1);

    apply(&mut reconciler, vec![("old", None)]);
    // Services are created and deleted until one of them gets the old id.
    for _ in 0..ROOMY.frontend_entries() {
        apply(&mut reconciler, vec![set("new", 2, &[1])]);
        if id(&reconciler, 2) == old {
            assert_eq!(
                counters_by_service(&reconciler),
                [("new".to_owned(), [0, 0, 0])]
            );
            return;
        }
        apply(&mut reconciler, vec![("new", None)]);
    }
    panic!("the id {old} is never reused");
}

#[test]
fn counters_that_a_killed_process_left_are_reset_by_the_next() {
    let mut reconciler = with_counts([set("old", 1, &[1])]);
    reconciler.update(update(vec![("old", None)]));
    // The process is killed before it frees the retired entries.
    drop(reconciler.write_changes());
    assert_eq!(reconciler.maps().service_counts.len(), 1);

    let next = adopt(reconciler.sync.tracked.maps);

    assert_eq!(next.maps().service_counts.len(), 0);
}

#[test]
fn the_number_of_listed_service_ports_is_limited() {
    let services = [("a", 1), ("b", 2), ("c", 3)];
    let reconciler = serving(ROOMY, services.map(|(name, vip)| set(name, vip, &[1])));

    for (most, names, left_out) in [
        (0, vec![], 3),
        (2, vec!["a", "b"], 1),
        (3, vec!["a", "b", "c"], 0),
        (9, vec!["a", "b", "c"], 0),
    ] {
        let counted = port_counters(&reconciler, most);
        let found = counted.ports.iter().map(|port| &*port.name.service.name);
        assert_eq!(found.collect::<Vec<_>>(), names);
        assert_eq!(counted.omitted, left_out);
    }
}
