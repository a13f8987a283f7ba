//! Compares Culvert with the reference model. Random clusters are read and programmed as on a node. For each
//! connection, the verdict from the maps must equal the model's.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde::Serialize;
use tunnel_common::{
    addr::{self, Address, Port},
    affinity::Client,
    decide::{self, ClientContext, ClientScalars, Identity, NoChoice, Traffic},
    lookup::Lookup,
    service::FrontendKey,
};
use tunnel_reference as reference;
use tunnel_reference::{
    Cluster, ConnectionSource, Frontend, HealthCheck, LocalNode, Protocol, Verdict,
};
use tunnel_tests::environment;
use tunnel_userspace::{
    k8s::{self, ApiObject, ParsedObject},
    model::{
        Algorithm, ClusterUpdate, ExternalIps, Family, NodeAddresses, Object, ObjectName,
        ServiceState, TopologyKeys,
    },
    plan::{HealthChecks, NodePortAddresses},
    reconcile::PlanSettings,
};

use crate::{
    memory::Memory,
    packets::{self, Link, MapsInMemory},
    programmed,
};

/// The default number of random clusters.
const CLUSTERS: u64 = 4000;

#[test]
fn the_product_and_the_reference_model_agree_on_random_clusters() {
    let first = environment::seed().unwrap_or_else(|| fastrand::u64(..));
    let clusters = environment::clusters().unwrap_or(CLUSTERS);
    let (mut frontends, mut verdicts) = (0, 0);
    for seed in (0..clusters).map(|number| first.wrapping_add(number)) {
        let (cluster, here) = reference::random::cluster(&mut fastrand::Rng::with_seed(seed));
        let compared = compare(cluster, &here).unwrap_or_else(|error| {
            panic!("cluster {seed} (of {clusters} from CULVERT_SEED={first} on): {error:#}")
        });
        frontends += compared.0;
        verdicts += compared.1;
    }
    assert!(frontends > 0 && verdicts > 0);
}

/// Compares Culvert with the model for one cluster, and returns how many frontends and how many verdicts were
/// compared.
pub(crate) fn compare(mut cluster: Cluster, here: &LocalNode) -> Result<(usize, usize)> {
    cluster.slices.iter_mut().for_each(name_ports);
    let wanted = reference::frontends(&cluster, here);
    let wanted: BTreeMap<FrontendKey, &Frontend> = wanted
        .iter()
        .map(|((ip, port, protocol), frontend)| (key(*ip, *port, *protocol), frontend))
        .collect();
    let (maps, checks) = program(&cluster, here)?;
    ensure!(
        health_checks(&checks) == reference::health_check_node_ports(&cluster, here),
        "health checks: {checks:?}"
    );
    let in_maps: BTreeSet<&FrontendKey> = maps.frontend_keys.keys().collect();
    let format = |key: &FrontendKey| key.to_string();
    let missing = wanted.keys().filter(|key| !in_maps.contains(key));
    let missing: Vec<_> = missing.map(format).collect();
    let stray = in_maps.into_iter().filter(|key| !wanted.contains_key(key));
    let stray: Vec<_> = stray.map(format).collect();
    ensure!(
        missing.is_empty() && stray.is_empty(),
        "missing frontends: {missing:?}; unexpected frontends: {stray:?}"
    );
    let mut verdicts = 0;
    for (key, frontend) in &wanted {
        let record = maps
            .frontend_keys
            .get(key)
            .and_then(|index| maps.frontends.get(index));
        let affinity = record.map(|record| record.affinity_timeout);
        ensure!(
            affinity == Some(frontend.affinity),
            "{key}: affinity {affinity:?}, expected {} s",
            frontend.affinity
        );
        for source in &reference::random::sources(frontend) {
            let wanted = reference::verdict(frontend, source, here);
            let found = match source {
                ConnectionSource::Outside(ip) if !here.addresses.contains(ip) => {
                    let (found, masqueraded) =
                        packets::decide(&maps, key, (*ip, Link::Uplink), here);
                    let is_masqueraded = |to| reference::is_masqueraded(frontend, *ip, to, here);
                    expect_masqueraded(&found, &masqueraded, is_masqueraded)
                        .with_context(|| format!("{key} from {source:?}"))?;
                    found
                }
                ConnectionSource::PodPacket(ip) => {
                    let (found, masqueraded) =
                        packets::decide(&maps, key, (*ip, Link::OfPod), here);
                    let is_masqueraded =
                        |to| reference::is_pod_masqueraded(frontend, *ip, to, here);
                    expect_masqueraded(&found, &masqueraded, is_masqueraded)
                        .with_context(|| format!("{key} from {source:?}"))?;
                    found
                }
                ConnectionSource::NodeSocket
                | ConnectionSource::PodSocket(_)
                | ConnectionSource::Outside(_) => verdict(&maps, key, source, here),
            };
            ensure!(
                found == wanted,
                "{key} ({:?}, {:?}) from {source:?}: {found:?}, expected {wanted:?}",
                frontend.kind,
                frontend.owner
            );
            verdicts += 1;
        }
    }
    Ok((wanted.len(), verdicts))
}

/// Fails unless exactly those backends are masqueraded that the model masquerades.
fn expect_masqueraded(
    verdict: &Verdict,
    masqueraded: &BTreeSet<SocketAddr>,
    is_masqueraded: impl Fn(IpAddr) -> bool,
) -> Result<()> {
    let Verdict::To(backends) = verdict else {
        return Ok(());
    };
    let wanted = backends
        .iter()
        .filter(|backend| is_masqueraded(backend.ip()));
    let wanted: BTreeSet<_> = wanted.copied().collect();
    ensure!(
        *masqueraded == wanted,
        "{masqueraded:?} are masqueraded, expected {wanted:?}"
    );
    Ok(())
}

/// Sets the names of unnamed ports to the empty string, as the API server does (`SetDefaults_EndpointPort` in
/// Kubernetes' `pkg/apis/discovery/v1`), and as Culvert does for manifests in files.
fn name_ports(slice: &mut EndpointSlice) {
    for port in slice.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
    }
}

/// Returns a frontend's key.
fn key(ip: IpAddr, port: u16, protocol: Protocol) -> FrontendKey {
    let protocol = match protocol {
        Protocol::Tcp => addr::Protocol::TCP,
        Protocol::Udp => addr::Protocol::UDP,
        Protocol::Sctp => addr::Protocol::SCTP,
    };
    FrontendKey::new(Address::from_ip(ip), Port::from_host(port), protocol)
}

/// Programs a cluster's objects into maps in memory, as on a node. Returns the maps and the health checks.
fn program(cluster: &Cluster, here: &LocalNode) -> Result<(Memory, Arc<HealthChecks>)> {
    let settings = PlanSettings {
        node_name: here.node.clone(),
        algorithm: Algorithm::Random,
        node_port_addresses: node_ports(here.node_port_addresses.as_deref()),
        external_ips: match here.external_ips {
            reference::ExternalIps::Any => ExternalIps::Any,
            reference::ExternalIps::Owned => ExternalIps::Owned,
        },
        node_addresses: match here.own_addresses {
            reference::OwnAddresses::Refuse => NodeAddresses::Refuse,
            reference::OwnAddresses::Serve => NodeAddresses::Serve,
        },
        translates_packets: true,
        local_listeners: [0].into(),
        topology_keys: match here.topology_keys {
            reference::TopologyKeys::Ignore => TopologyKeys::Ignore,
            reference::TopologyKeys::Honor => TopologyKeys::Honor,
        },
        namespace_share: 100,
    };
    let reconciler = programmed(settings, &here.addresses, update(cluster)?)?;
    ensure!(!reconciler.is_dirty(), "not everything was written");
    let checks = reconciler.health().unwrap_or_default();
    Ok((reconciler.maps().clone(), checks))
}

/// Returns the responses from Culvert's health check ports, keyed by port.
fn health_checks(checks: &HealthChecks) -> BTreeMap<u16, HealthCheck> {
    let family = |(family, count): (&Family, &usize)| match family {
        Family::V4 => (reference::address::Family::Ipv4, *count),
        Family::V6 => (reference::address::Family::Ipv6, *count),
    };
    let services = checks.services.iter();
    let health_checks = services.map(|(name, check)| {
        let health_check = HealthCheck {
            namespace: name.namespace.to_string(),
            service: name.name.to_string(),
            local_ready: check.ready_endpoints.iter().map(family).collect(),
        };
        (check.port, health_check)
    });
    health_checks.collect()
}

fn node_ports(wanted: Option<&[reference::NodePortEntry]>) -> Vec<NodePortAddresses> {
    let entry = |entry: &reference::NodePortEntry| match entry {
        reference::NodePortEntry::Cidr(cidr) => NodePortAddresses::Range(
            cidr.address(),
            u8::try_from(cidr.length()).unwrap_or(u8::MAX),
        ),
        reference::NodePortEntry::Primary => NodePortAddresses::Primary,
        reference::NodePortEntry::Localhost => NodePortAddresses::Localhost,
        reference::NodePortEntry::All => NodePortAddresses::All,
    };
    match wanted {
        None => vec![NodePortAddresses::Primary, NodePortAddresses::Localhost],
        Some([]) => vec![NodePortAddresses::All],
        Some(entries) => entries.iter().map(entry).collect(),
    }
}

/// Builds an update that contains all objects in a cluster, as if they had been read from the API server.
fn update(cluster: &Cluster) -> Result<ClusterUpdate> {
    let mut update = ClusterUpdate {
        synced: true,
        complete: true,
        ..ClusterUpdate::default()
    };
    let mut states: BTreeMap<ObjectName, ServiceState> = BTreeMap::new();
    for object in receive(&cluster.services)? {
        if let Object::Service(service) = object {
            let slices = Vec::new();
            states.insert(service.name.clone(), ServiceState { service, slices });
        }
    }
    for object in receive(&cluster.slices)? {
        if let Object::EndpointSlice(slice) = object
            && let Some(state) = states.get_mut(&slice.service)
        {
            state.slices.push(Arc::clone(&slice));
        }
    }
    for object in receive(&cluster.nodes)? {
        if let Object::Node(node) = object {
            update.nodes.push((node.name.clone(), Some(node)));
        }
    }
    let states = states.into_iter().map(|(name, state)| (name, Some(state)));
    update.services = states.collect();
    Ok(update)
}

/// Parses objects of one kind as if they came from the API server, and leaves out those that Culvert ignores.
fn receive<K: ApiObject + Serialize>(objects: &[K]) -> Result<Vec<Object>> {
    let mut arrived = Vec::new();
    for object in objects {
        let json = serde_json::to_string(object)?;
        let read = k8s::parse_received::<K>(&json)?;
        let taken = read
            .object
            .with_context(|| format!("{} was refused", read.id))?;
        arrived.extend(taken.map(|ParsedObject { object, .. }| object));
    }
    Ok(arrived)
}

/// Implements `ClientContext` for the source of a connection.
struct ClientOfConnection<'a> {
    source: &'a ConnectionSource,
    here: &'a LocalNode,
}

impl ClientContext for ClientOfConnection<'_> {
    fn client(&self, is_v4: bool) -> Identity {
        let ip = match self.source {
            ConnectionSource::PodSocket(ip)
            | ConnectionSource::PodPacket(ip)
            | ConnectionSource::Outside(ip) => Some(*ip),
            ConnectionSource::NodeSocket => {
                let mut own = self.here.addresses.iter().copied();
                own.find(|ip| ip.is_ipv4() == is_v4 && !ip.is_loopback())
            }
        };
        let client = ip.map_or(Client::of_namespace(1), |ip| {
            Client::of_address(Address::from_ip(ip))
        });
        Identity {
            client: ClientScalars::new(&client),
            is_by_source: !matches!(self.source, ConnectionSource::NodeSocket),
        }
    }

    fn is_bound_to_loopback(&self, _: bool) -> bool {
        false
    }

    fn is_known_host(&self) -> bool {
        matches!(self.source, ConnectionSource::NodeSocket)
    }
}

/// Returns the verdict on a new connection of a socket. It is reached as in Culvert's BPF programs, once for each slot in
/// the backend set, to find all the backends that they may choose.
fn verdict(
    maps: &Memory,
    key: &FrontendKey,
    source: &ConnectionSource,
    here: &LocalNode,
) -> Verdict {
    let traffic = Traffic::Sockets;
    let maps_in_memory = MapsInMemory::new(maps, Link::Uplink, here);
    let client = ClientOfConnection { source, here };
    let record = match decide::find_frontend(&maps_in_memory, &client, key, traffic) {
        Lookup::Found(record) => record,
        Lookup::None => return Verdict::Untouched,
        Lookup::Unstable => panic!("the record of {key} has another key"),
    };
    let mut targets = BTreeSet::new();
    for slot in 0..traffic.set(record.frontend).len.max(1) {
        maps_in_memory.slot.set(slot);
        match decide::choose_backend(&maps_in_memory, &client, key, record, traffic) {
            Ok(choice) => {
                targets.insert(SocketAddr::new(
                    choice.address.to_ip(),
                    choice.port.to_host(),
                ));
            }
            Err(NoChoice::InvalidRecord) => {
                panic!("the record of {key} has an invalid slot or backend")
            }
            Err(none) if none.is_drop() => return Verdict::Dropped,
            Err(_) => return Verdict::Refused,
        }
    }
    Verdict::To(targets)
}
