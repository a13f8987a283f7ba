use tunnel_common::{addr::Protocol, flow::Seen, packet::TcpFlags};

use super::*;
use crate::flows::fixture::{MemoryFlows, dialled, endpoint};

fn listed(map: &Arc<MemoryFlows>, filter: FlowFilter, names: PortNames) -> Vec<FlowView> {
    let flows = list(Arc::clone(map), filter, names, 1000);
    flows.collect::<Result<_, _>>().expect("a list")
}

#[test]
fn each_flow_is_listed_once_and_filters_select_by_client_and_service() {
    let map = Arc::new(MemoryFlows::default());
    let answered = Seen::from_backend(TcpFlags::from_byte(0x10));
    for client in ["203.0.113.9:1", "203.0.113.9:2", "203.0.113.10:3"] {
        let acknowledged = Seen::from_client(TcpFlags::from_byte(0x10));
        let flow = dialled(client, Protocol::TCP, 900, acknowledged);
        map.insert_all(flow, 990, answered);
    }
    let names = || PortNames::from([(7, "shop/web:http/TCP IPv4".to_owned())]);

    let all = listed(&map, FlowFilter::default(), names());
    assert_eq!(all.len(), 3);
    let first = FlowView {
        service: "shop/web:http/TCP IPv4".to_owned(),
        protocol: "TCP".to_owned(),
        client: "203.0.113.9:1".to_owned(),
        frontend: "192.0.2.1:80".to_owned(),
        backend: "10.0.0.1:8080".to_owned(),
        masquerade: Some("192.0.2.9:1".to_owned()),
        state: "established".to_owned(),
        idle_seconds: 10,
    };
    assert!(all.contains(&first), "{all:?}");

    let of_client = FlowFilter {
        client: Some(endpoint("203.0.113.9:1").address),
        service: None,
    };
    assert_eq!(listed(&map, of_client, names()).len(), 2);
    let of_service = FlowFilter {
        client: None,
        service: Some("shop/web".to_owned()),
    };
    assert_eq!(listed(&map, of_service.clone(), names()).len(), 3);
    assert_eq!(listed(&map, of_service, PortNames::default()).len(), 0);
    let unknown = listed(&map, FlowFilter::default(), PortNames::default());
    assert_eq!(unknown[0].service, "7 (not programmed)");
}

#[test]
fn a_connection_that_is_sent_to_the_tunnel_has_no_service() {
    let map = Arc::new(MemoryFlows::default());
    let answered = Seen::from_backend(TcpFlags::from_byte(0x10));
    let mut flow = dialled("203.0.113.9:1", Protocol::TCP, 900, answered);
    flow.service = Flow::NO_SERVICE;
    map.insert_all(flow, 990, answered);
    let all = listed(&map, FlowFilter::default(), PortNames::default());
    assert_eq!(all[0].service, "tunnel");
}
