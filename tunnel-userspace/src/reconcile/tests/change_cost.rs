//! The cost of a single change among a very large number of Services.

use super::*;

const SERVICES: u32 = 30_000;

/// Sizes with room for all Services and for some changes.
const SIZES: MapSizes = MapSizes {
    frontends: 4 * SERVICES,
    slots: 4 * SERVICES,
    backends: 4 * SERVICES,
    ..MapSizes::uniform(64)
};

fn name(number: u32) -> ObjectName {
    ObjectName::new("default", format!("svc-{number}"))
}

fn address(family: Family, number: u32) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(0x0a60_0000 + number)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(0xfd00 << 112 | u128::from(number))),
    }
}

/// Returns a dual-stack Service with one endpoint in each address family.
fn dual_stack(number: u32, endpoints: [u32; 2]) -> ServiceState {
    let both = [Family::V4, Family::V6];
    let service = Service {
        cluster_ips: both.map(|family| address(family, number)).to_vec(),
        ports: vec![fixture::http(80)],
        ..Service::named(name(number))
    };
    let slice = |(family, endpoint): (Family, u32)| {
        let endpoints = vec![fixture::endpoint(address(family, 0x10_0000 + endpoint))];
        let (slice, ports) = (format!("svc-{number}-{family:?}"), &[("http", 8080)]);
        let slice = fixture::slice(&slice, &name(number), family, ports, endpoints);
        Arc::new(slice)
    };
    ServiceState {
        service: Arc::new(service),
        slices: both.into_iter().zip(endpoints).map(slice).collect(),
    }
}

fn update_of(services: impl Iterator<Item = (u32, [u32; 2])>) -> ClusterUpdate {
    let state = |(number, endpoints)| (name(number), Some(dual_stack(number, endpoints)));
    ClusterUpdate {
        services: services.map(state).collect(),
        ..update(Vec::new())
    }
}

#[test]
fn a_changed_slice_among_many_services_plans_and_writes_only_its_service() {
    let mut maps = Memory::new(SIZES);
    maps.checks_every_write = false;
    let mut reconciler = adopt(maps);
    reconciler.update(update_of(
        (0..SERVICES).map(|number| (number, [number, number])),
    ));
    settle(&mut reconciler);
    assert_eq!(reconciler.desired.plans_computed, u64::from(SERVICES));
    assert_eq!(reconciler.maps().frontend_keys.len(), 2 * 30_000);

    for (family, change) in [
        (Family::V4, (17_000, [SERVICES, 17_000])),
        (Family::V6, (23_000, [23_000, SERVICES])),
    ] {
        let (planned, written) = (reconciler.desired.plans_computed, reconciler.maps().writes);
        reconciler.update(update_of(std::iter::once(change)));
        reconciler.write_changes();

        assert_eq!(reconciler.desired.plans_computed, planned + 1, "{family:?}");
        // The writes are for a new backend, slot and record, for the frontend key, and for removing the old
        // backend.
        let writes = reconciler.maps().writes - written;
        assert!((1..=8).contains(&writes), "{family:?}: {writes} writes");
        let key = http_at(address(family, change.0));
        let backends = reconciler.maps().backends_of(&key).expect("a frontend");
        let found = backends.iter().map(|backend| backend.address.to_ip());
        assert!(found.eq([address(family, 0x10_0000 + SERVICES)]));
    }
}
