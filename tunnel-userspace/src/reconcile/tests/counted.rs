//! What programs counted of service ports.

use tunnel_common::service::Tally;

use super::*;

/// What programs count of a Service from now on.
fn count(reconciler: &mut Reconciler<Memory>, vip_of: u8, sent: u64, refused: u64) {
    let service = reconciler.sync.ports.actual.fronts[&vip(vip_of)]
        .record
        .service;
    let tallied = Tally {
        sent,
        refused,
        ..Tally::default()
    };
    reconciler.sync.ports.maps.tallies.insert(service, tallied);
}

fn counted(reconciler: &Reconciler<Memory>, most: usize) -> Counted {
    reconciler.published.counted(reconciler.maps(), most)
}

/// What is shown of each Service: its name, what was sent, refused, and is open.
fn shown(reconciler: &Reconciler<Memory>) -> Vec<(String, [u64; 3])> {
    let ports = counted(reconciler, usize::MAX).ports.into_iter();
    ports
        .map(|port| {
            let name = port.name.service.name.to_string();
            (name, [port.sent, port.refused, port.open])
        })
        .collect()
}

#[test]
fn a_service_port_has_what_was_counted_of_it_and_of_its_backends() {
    let mut reconciler = serving(ROOMY, [set("a", 1, &[1, 2]), set("b", 2, &[1])]);
    count(&mut reconciler, 1, 7, 3);
    let indices: Vec<u32> = reconciler.maps().be.keys().copied().collect();
    for index in indices {
        reconciler.maps().conns.0.lock().unwrap().insert(index, 5);
    }

    let wanted = [("a".to_owned(), [7, 3, 10]), ("b".to_owned(), [0, 0, 5])];
    assert_eq!(shown(&reconciler), wanted);
    assert_eq!(shown(&after_restart(reconciler)), wanted);
}

#[test]
fn a_service_that_takes_the_place_of_another_begins_with_nothing() {
    let mut reconciler = serving(ROOMY, [set("old", 1, &[1])]);
    count(&mut reconciler, 1, 7, 3);
    let id = reconciler.sync.ports.actual.fronts[&vip(1)].record.service;

    apply(&mut reconciler, vec![("old", None)]);
    // Ids are given out again once there are no others.
    for _ in 0..ROOMY.front_entries() {
        apply(&mut reconciler, vec![set("new", 2, &[1])]);
        if reconciler.sync.ports.actual.fronts[&vip(2)].record.service == id {
            assert_eq!(shown(&reconciler), [("new".to_owned(), [0, 0, 0])]);
            return;
        }
        apply(&mut reconciler, vec![("new", None)]);
    }
    panic!("the id {id} never came back");
}

#[test]
fn what_a_process_did_not_come_to_reset_is_reset_by_the_next() {
    let mut reconciler = serving(ROOMY, [set("old", 1, &[1])]);
    count(&mut reconciler, 1, 7, 3);
    reconciler.update(update(vec![("old", None)]));
    // Killed before what went could be freed.
    drop(reconciler.pass());
    assert_eq!(reconciler.maps().tallies.len(), 1);

    let next = adopt(reconciler.sync.ports.maps);

    assert_eq!(next.maps().tallies.len(), 0);
}

#[test]
fn no_more_service_ports_are_counted_than_asked_for() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let services = [("a", 1), ("b", 2), ("c", 3)];
    apply(
        &mut reconciler,
        services.map(|(name, vip)| set(name, vip, &[1])).into(),
    );

    for (most, names, left_out) in [
        (0, vec![], 3),
        (2, vec!["a", "b"], 1),
        (3, vec!["a", "b", "c"], 0),
        (9, vec!["a", "b", "c"], 0),
    ] {
        let counted = counted(&reconciler, most);
        let found = counted.ports.iter().map(|port| &*port.name.service.name);
        assert_eq!(found.collect::<Vec<_>>(), names);
        assert_eq!(counted.left_out, left_out);
    }
}

fn after_restart(reconciler: Reconciler<Memory>) -> Reconciler<Memory> {
    let states: Vec<_> = reconciler.desired.states.clone().into_iter().collect();
    let mut next = adopt(reconciler.sync.ports.maps);
    let states: Vec<_> = states
        .iter()
        .map(|(name, state)| (&*name.name, Some(state.clone())))
        .collect();
    apply(&mut next, states);
    next
}
