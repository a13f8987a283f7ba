use tunnel_common::{addr::Protocol, flow::Seen, packet::TcpFlags};

use super::*;
use crate::flows::fixture::{MemoryFlows, acknowledged, answered, dialled, endpoint};

const NOW: u32 = 1_000_000;

fn closed_by_backend() -> Seen {
    Seen::from_backend(TcpFlags::from_byte(0x11))
}

fn closed_by_client() -> Seen {
    Seen::from_client(TcpFlags::from_byte(0x11))
}

/// Sweeps until nothing is left to remove. The map in memory leaves entries out if others are removed meanwhile.
fn swept(map: &MemoryFlows) -> FlowCounts {
    for _ in 0..10 {
        sweep(map, &Timeouts::DEFAULT, NOW).expect("swept");
    }
    sweep(map, &Timeouts::DEFAULT, NOW).expect("swept")
}

#[test]
fn flows_are_counted_by_the_phase_that_both_directions_show() {
    let map = MemoryFlows::default();
    let recent = NOW - 5;
    for (port, protocol, of_client, of_backend) in [
        (1, Protocol::TCP, Seen::NOTHING, Seen::NOTHING),
        (2, Protocol::TCP, acknowledged(), answered()),
        (3, Protocol::TCP, closed_by_client(), answered()),
        (4, Protocol::TCP, closed_by_client(), closed_by_backend()),
        (5, Protocol::UDP, Seen::NOTHING, Seen::NOTHING),
        (6, Protocol::UDP, Seen::NOTHING, answered()),
        // A client that forges its address gets no answer, and acknowledges nothing.
        (7, Protocol::TCP, Seen::NOTHING, answered()),
    ] {
        let client = format!("203.0.113.9:{port}");
        map.insert_all(
            dialled(&client, protocol, recent, of_client),
            recent,
            of_backend,
        );
    }

    let counts = swept(&map);

    let expected = [
        (Phase::HalfOpen, 2),
        (Phase::Established, 1),
        (Phase::HalfClosed, 1),
        (Phase::Closing, 1),
        (Phase::Unanswered, 1),
        (Phase::Answered, 1),
    ];
    assert_eq!(counts.by_phase, expected.into());
    assert_eq!((counts.entries, map.len()), (21, 21));
}

#[test]
fn a_flow_is_removed_once_neither_direction_is_used_any_more() {
    let map = MemoryFlows::default();
    let udp = |client| dialled(client, Protocol::UDP, NOW - 130, Seen::NOTHING);
    map.insert_all(udp("203.0.113.9:1"), NOW - 130, answered());
    // Only the backend sends.
    map.insert_all(udp("203.0.113.9:2"), NOW - 5, answered());
    let mut ended = dialled("203.0.113.9:3", Protocol::TCP, NOW, answered());
    ended.flags |= Flow::ENDED;
    map.insert_all(ended, NOW, answered());

    let counts = swept(&map);

    assert_eq!(counts.by_phase, [(Phase::Answered, 1)].into());
    assert_eq!((counts.entries, map.len()), (3, 3));
}

#[test]
fn an_entry_whose_flow_is_gone_is_removed_once_it_is_idle() {
    let map = MemoryFlows::default();
    let rest = |client, last_used| Flow {
        role: Role::FORWARDED,
        ..dialled(client, Protocol::UDP, last_used, Seen::NOTHING)
    };
    map.insert(rest("203.0.113.9:1", NOW - 31));
    map.insert(rest("203.0.113.9:2", NOW - 3));

    assert_eq!(swept(&map).entries, 1);
    assert_eq!(map.len(), 1);
}

#[test]
fn entries_of_a_flow_that_another_one_has_replaced_are_removed() {
    let map = MemoryFlows::default();
    let of_backend = |port, flags| Flow {
        backend: endpoint(&format!("10.0.0.1:{port}")),
        flags,
        ..dialled("203.0.113.9:1", Protocol::UDP, NOW, Seen::NOTHING)
    };
    for port in 8081..=8088 {
        map.insert_all(of_backend(port, Flow::ENDED), NOW, answered());
    }
    // The flow that has the dialled entry now, and the port of the node that it had before.
    map.insert_all(of_backend(8089, 0), NOW, answered());
    map.insert(Flow {
        role: Role::MASQUERADED,
        masquerade: endpoint("192.0.2.9:5"),
        ..of_backend(8089, Flow::ENDED)
    });
    // The entries of a flow are kept even if its backend sends nothing.
    let silent = dialled("203.0.113.9:2", Protocol::UDP, NOW, Seen::NOTHING);
    map.insert_all(silent, NOW - 60, Seen::NOTHING);
    assert_eq!(map.len(), 3 + 8 * 2 + 1 + 3);

    let counts = swept(&map);

    assert_eq!(counts.by_phase.values().sum::<usize>(), 2);
    assert_eq!((counts.entries, map.len()), (6, 6));
}

#[test]
fn a_flow_stays_whole_if_a_packet_has_used_it_meanwhile() {
    let map = MemoryFlows::default();
    let read = dialled("203.0.113.9:1", Protocol::UDP, NOW - 60, Seen::NOTHING);
    map.insert_all(
        Flow {
            last_used: NOW,
            ..read
        },
        NOW - 60,
        answered(),
    );
    let forwarded = entry_of(&map, &read, Role::FORWARDED).expect("read");
    let mut counts = FlowCounts::default();

    let clock = (&Timeouts::DEFAULT, NOW);
    let removed = remove_flow(&map, clock, (&read, forwarded.as_ref()), &mut counts);

    assert!(!removed.expect("no error"));
    assert_eq!((map.len(), counts.removed), (3, 0));
}
