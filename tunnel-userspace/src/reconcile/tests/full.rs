//! Maps that are full.

use super::*;

#[test]
fn a_service_that_wants_more_fronts_than_there_is_room_for_still_follows_its_endpoints() {
    let mut reconciler = adopt(Memory::new(Sizes { fronts: 2, ..ROOMY }));
    apply(
        &mut reconciler,
        vec![set("a", 1, &[1, 2]), set("b", 2, &[3])],
    );
    let (name, state) = set("a", 1, &[2]);
    let mut state = state.expect("a Service");
    Arc::make_mut(&mut state.service)
        .external_ips
        .push(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7)));

    apply(&mut reconciler, vec![(name, Some(state))]);

    assert_eq!(problem(&reconciler, "a"), Some(Reason::FrontsFull));
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
    assert!(!reconciler.is_dirty());
    let serving = reconciler.maps.be.values();
    assert_eq!(serving.filter(|it| it.state.is_serving()).count(), 2);
}
