//! Maps that are full.

use super::*;

#[test]
fn a_service_that_wants_more_fronts_than_there_is_room_for_still_follows_its_endpoints() {
    let mut reconciler = serving(
        Sizes { fronts: 2, ..ROOMY },
        [set("a", 1, &[1, 2]), set("b", 2, &[3])],
    );
    let (name, state) = set("a", 1, &[2]);
    let mut state = state.expect("a Service");
    Arc::make_mut(&mut state.service)
        .external_ips
        .push("2001:db8::7".parse().expect("an address"));

    apply(&mut reconciler, vec![(name, Some(state))]);

    assert_eq!(problem(&reconciler, "a"), Some(Reason::FrontsFull));
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
    assert!(!reconciler.is_dirty());
    let serving = reconciler.maps().be.values();
    assert_eq!(serving.filter(|it| it.state.is_serving()).count(), 2);
}

#[test]
fn a_service_that_finds_no_room_is_named_and_comes_when_there_is_room() {
    for (sizes, reason) in [
        (Sizes { fronts: 2, ..ROOMY }, Reason::FrontsFull),
        (Sizes { slots: 4, ..ROOMY }, Reason::SlotsFull),
        (
            Sizes {
                backends: 4,
                ..ROOMY
            },
            Reason::BackendsFull,
        ),
    ] {
        let mut reconciler = adopt(Memory::new(sizes));
        apply(
            &mut reconciler,
            vec![set("a", 1, &[1, 2]), set("b", 2, &[3, 4])],
        );
        apply(&mut reconciler, vec![set("c", 3, &[5])]);
        assert_eq!(problem(&reconciler, "c"), Some(reason));
        assert_eq!(backends(&reconciler, 3), None);
        assert_eq!(backends(&reconciler, 1), Some(vec![1, 2]));

        apply(&mut reconciler, vec![("a", None)]);

        assert_eq!(backends(&reconciler, 3), Some(vec![5]), "{reason:?}");
        assert_eq!(problem(&reconciler, "c"), None);
        assert_eq!(backends(&reconciler, 2), Some(vec![3, 4]));
    }
}

#[test]
fn what_finds_no_room_is_told_of_on_the_service_and_on_the_node() {
    let mut reconciler = adopt(Memory::new(Sizes { fronts: 1, ..ROOMY }));
    let (name, state) = set("b", 2, &[2]);
    let known = state.map(|state| ServiceState {
        service: Arc::new(Service {
            uid: Some(Arc::from("1-2-3")),
            ..Service::clone(&state.service)
        }),
        ..state
    });
    apply(&mut reconciler, vec![set("a", 1, &[1]), (name, known)]);

    let told: Vec<_> = reconciler
        .concerns(&BTreeSet::new())
        .into_iter()
        .map(|concern| (concern.about.to_string(), concern.uid, concern.reason))
        .collect();

    assert_eq!(
        told,
        [
            ("Node node-a".to_owned(), None, Reason::FrontsFull),
            (
                "Service default/b".to_owned(),
                Some(Arc::from("1-2-3")),
                Reason::FrontsFull
            ),
        ]
    );
    apply(&mut reconciler, vec![("a", None)]);
    assert!(reconciler.concerns(&BTreeSet::new()).is_empty());
}

#[test]
fn a_service_that_outgrows_the_maps_loses_what_left_and_keeps_the_rest() {
    let mut reconciler = serving(
        Sizes {
            backends: 3,
            ..ROOMY
        },
        [set("web", 1, &[1, 2, 3])],
    );

    apply(&mut reconciler, vec![set("web", 1, &[2, 3, 4, 5])]);

    assert_eq!(problem(&reconciler, "web"), Some(Reason::BackendsFull));
    assert_eq!(backends(&reconciler, 1), Some(vec![2, 3]));
}

#[test]
fn full_maps_still_take_a_change_that_needs_no_more_room() {
    let mut reconciler = serving(
        Sizes {
            fronts: 2,
            slots: 4,
            backends: 4,
            ..ROOMY
        },
        [set("a", 1, &[1, 2]), set("b", 2, &[3, 4])],
    );

    apply(&mut reconciler, vec![set("a", 1, &[5, 6])]);

    assert_eq!(backends(&reconciler, 1), Some(vec![5, 6]));
    assert_eq!(problem(&reconciler, "a"), None);
}
