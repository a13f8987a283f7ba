//! Writers of the service maps: the daemon's own, one that skips the grace period, and one that replaces
//! frontend entries with equivalent ones.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use tokio::{
    runtime::Runtime,
    sync::{mpsc, watch},
};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::{
        Algorithm, Backend, BackendState, Frontend, FrontendKey, IndexRange, InlineBackend,
        MAX_INLINE_BACKENDS, Membership, Slot,
    },
};
use tunnel_userspace::{
    bpf::{KernelMaps, KernelSteering, RcuGrace},
    model::{
        self, ClusterUpdate, Endpoint, EndpointPort, EndpointSlice, Family, ObjectName,
        ServicePort, ServiceState,
    },
    reconcile::{
        MapWriter as _, ReconcileLoop, ReconcileStats, SteeringReconciler, SteeringSettings,
        Updates,
    },
};

use super::fixture::{self, Change, ENDPOINTS, RandomChanges, SERVICES, UDP_SERVICES};
use crate::{programs::Programs, support::DNS};

/// The interval between audits, which is longer than any test.
const AUDIT: Duration = Duration::from_secs(3600);

/// The number of endpoint changes in each of a source's updates.
const CHANGES_PER_UPDATE: usize = 4;

/// The daemon's own writer: the reconcile loop of `culvert node`.
pub(crate) struct DaemonWriter {
    owner: ReconcileLoop<KernelMaps, KernelSteering, RcuGrace>,
    family: Family,
    runtime: Runtime,
}

/// Passes a source's updates to the reconcile loop.
struct UpdateReceiver(mpsc::Receiver<ClusterUpdate>);

impl Updates for UpdateReceiver {
    async fn update(&mut self) -> Option<ClusterUpdate> {
        self.0.recv().await
    }
}

impl DaemonWriter {
    /// Creates a writer that has programmed every Service with all of its endpoints.
    pub(crate) fn new(programs: &Programs, maps: KernelMaps, family: Family) -> Result<Self> {
        let grace = RcuGrace::new()?;
        let reconciler = programs.reconciler(maps, &grace)?;
        let off = SteeringSettings {
            rules: None,
            prefixes: Vec::new(),
            ingress_port: 0,
        };
        let data_path = &programs.data_path;
        let steering = data_path.open_steering()?;
        let steering = SteeringReconciler::adopt(steering, data_path.sizes(), off, Duration::ZERO)?;
        let mut owner = ReconcileLoop::new(reconciler, steering, grace, AUDIT);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()?;
        runtime.block_on(owner.apply(update(family, (0..SERVICES).map(Change::all_endpoints))))?;
        Ok(Self {
            owner,
            family,
            runtime,
        })
    }

    /// Changes endpoints until `stop` is set. Returns how many changes it made, and the reconcile loop's
    /// statistics.
    pub(crate) fn run(self, seed: u32, stop: &AtomicBool) -> Result<(u64, ReconcileStats)> {
        let Self {
            owner,
            family,
            runtime,
        } = self;
        let mut stats = owner.stats();
        let (sender, updates) = mpsc::channel(1);
        let (_drain, draining) = watch::channel(false);
        let (_links, addresses) = watch::channel(Arc::default());
        // The reconcile loop ends when the sender is dropped.
        let feed = async {
            let mut changes = 0;
            let mut random = RandomChanges::new(seed);
            while !stop.load(Ordering::Relaxed) {
                let changes_made = update(family, random.by_ref().take(CHANGES_PER_UPDATE));
                sender.send(changes_made).await?;
                stats.changed().await?;
                changes += u64::try_from(CHANGES_PER_UPDATE)?;
            }
            drop(sender);
            anyhow::Ok(changes)
        };
        let owner = owner.run(UpdateReceiver(updates), addresses, draining);
        let ((), changes) = runtime.block_on(async { tokio::join!(owner, feed) });
        let last = stats.borrow().clone();
        Ok((changes?, last))
    }
}

/// Builds the update that a source would send after the given endpoint changes.
fn update(family: Family, changes: impl IntoIterator<Item = Change>) -> ClusterUpdate {
    let state = |change: Change| {
        let name = ObjectName::new("default", fixture::name(change.service));
        (name.clone(), Some(state(family, change, name)))
    };
    ClusterUpdate {
        services: changes.into_iter().map(state).collect(),
        synced: true,
        complete: true,
        ..ClusterUpdate::default()
    }
}

fn state(family: Family, change: Change, name: ObjectName) -> ServiceState {
    let (protocol, port, target) = fixture::port(change.service);
    let port_name: Arc<str> = Arc::from("main");
    let service = model::Service {
        cluster_ips: vec![fixture::vip(family, change.service)],
        ports: vec![ServicePort {
            name: Arc::clone(&port_name),
            port,
            node_port: None,
            protocol,
        }],
        ..model::Service::named(name.clone())
    };
    let endpoint = |address| Endpoint {
        address,
        ready: true,
        serving: true,
        terminating: false,
        node: None,
        name: None,
        zone: None,
        hints: None,
    };
    let slice = EndpointSlice {
        name: name.clone(),
        service: name,
        family,
        ports: vec![EndpointPort {
            name: port_name,
            port: target,
            protocol,
        }],
        endpoints: change.addresses(family).map(endpoint).collect(),
        triggered: None,
    };
    ServiceState {
        service: Arc::new(service),
        slices: vec![Arc::new(slice)],
    }
}

/// A writer that skips the grace period. Like the daemon, it writes new entries next to the old ones and
/// switches to them with a single hash map update. But it immediately reuses the old entries for the next
/// Service, even though programs may still be reading them. After each hash map update, every ClusterIP leads
/// to its own backends.
pub(crate) struct GracelessWriter {
    maps: KernelMaps,
    family: Family,
    /// The index of each Service's block of map entries: a frontend record and the slots of one backend set.
    blocks: Vec<u32>,
    spare: u32,
}

impl GracelessWriter {
    /// Creates a writer that has programmed every UDP Service with all of its endpoints.
    pub(crate) fn new(maps: KernelMaps, family: Family) -> Result<Self> {
        let mut writer = Self {
            maps,
            family,
            blocks: (0..u32::from(UDP_SERVICES)).collect(),
            spare: UDP_SERVICES.into(),
        };
        for service in 0..UDP_SERVICES {
            writer.write_backends(service)?;
            writer.write(Change::all_endpoints(service), service.into())?;
        }
        Ok(writer)
    }

    /// Changes endpoints until `stop` is set, and returns how many changes it made.
    pub(crate) fn run(mut self, seed: u32, stop: &AtomicBool) -> Result<u64> {
        let mut changes = 0;
        let is_read = |change: &Change| change.service < UDP_SERVICES;
        for change in RandomChanges::new(seed).filter(is_read) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            self.write(change, self.spare)?;
            let block = self
                .blocks
                .get_mut(usize::from(change.service))
                .with_context(|| format!("no block of Service {}", change.service))?;
            std::mem::swap(block, &mut self.spare);
            changes += 1;
        }
        Ok(changes)
    }

    fn write(&mut self, change: Change, block: u32) -> Result<()> {
        let key = key(self.family, change.service, DNS);
        let base = block * u32::from(ENDPOINTS);
        let (_, _, port) = fixture::port(change.service);
        let mut len = 0;
        let mut near = [InlineBackend::NONE; MAX_INLINE_BACKENDS];
        for (slot, number) in (base..).zip(change.endpoints()) {
            let index = backend_index(change.service) + u32::from(number);
            let address = fixture::backend(self.family, change.service, number);
            let entry = Slot {
                backend: index,
                share: 1,
            };
            self.maps.write_slots(slot, &[entry])?;
            if let Some(near) = near.get_mut(usize::try_from(len)?) {
                *near = InlineBackend {
                    address: Address::from_ip(address),
                    port: Port::from_host(port),
                    share: 1,
                    index,
                };
            }
            len += 1;
        }
        let record = Frontend {
            key,
            service: change.service.into(),
            cluster: IndexRange { base, len },
            algorithm: Algorithm::RANDOM,
            flags: 0,
            packet_flags: 0,
            reserved: 0,
            inline_backends: if len > 3 {
                [InlineBackend::NONE; MAX_INLINE_BACKENDS]
            } else {
                near
            },
            local: IndexRange::default(),
            affinity_timeout: 0,
            source_ranges: IndexRange::default(),
        };
        self.maps.write_frontend(block, &record)?;
        self.maps.write_frontend_key(&key, block)?;
        Ok(())
    }

    fn write_backends(&mut self, service: u8) -> Result<()> {
        let (_, _, port) = fixture::port(service);
        let addresses = Change::all_endpoints(service).addresses(self.family);
        let backend = |address| Backend {
            address: Address::from_ip(address),
            port: Port::from_host(port),
            protocol: Protocol::UDP,
            flags: 0,
            service: service.into(),
            state: BackendState::default().next_generation(),
            sets: Membership::NONE,
        };
        let backends = (backend_index(service)..).zip(addresses.map(backend));
        let (_, written) = self.maps.write_backends(&backends.collect::<Vec<_>>());
        written?;
        Ok(())
    }
}

/// A writer that repeatedly replaces the record index in every UDP frontend's hash map entry with the index
/// of an identical record. It fills the rest of the hash map with other frontends and replaces their entries
/// too, so that nearly every hash chain has several entries.
pub(crate) struct RecordSwapper {
    writer: GracelessWriter,
}

impl RecordSwapper {
    /// The number of frontends in the hash map.
    pub(crate) const FRONTS: u32 = 64;

    /// Creates a writer that has programmed every UDP Service; [`Self::run`] fills the rest of the hash map.
    pub(crate) fn new(maps: KernelMaps, family: Family) -> Result<Self> {
        let mut writer = GracelessWriter::new(maps, family)?;
        for service in 0..UDP_SERVICES {
            writer.write(
                Change::all_endpoints(service),
                u32::from(service) + u32::from(UDP_SERVICES),
            )?;
        }
        Ok(Self { writer })
    }

    /// Replaces all entries repeatedly until `stop` is set, and returns how many times it did so.
    pub(crate) fn run(mut self, stop: &AtomicBool) -> Result<u64> {
        let GracelessWriter { maps, family, .. } = &mut self.writer;
        let mut rounds = 0;
        while !stop.load(Ordering::Relaxed) {
            let first = if rounds % 2 == 0 {
                0
            } else {
                u32::from(UDP_SERVICES)
            };
            for service in 0..UDP_SERVICES {
                let block = first + u32::from(service);
                maps.write_frontend_key(&key(*family, service, DNS), block)?;
            }
            for port in 1..=u16::try_from(Self::FRONTS)? - u16::from(UDP_SERVICES) {
                maps.write_frontend_key(&key(*family, 0, DNS + port), first)?;
            }
            rounds += 1;
        }
        Ok(rounds)
    }
}

fn key(family: Family, service: u8, port: u16) -> FrontendKey {
    FrontendKey::new(
        Address::from_ip(fixture::vip(family, service)),
        Port::from_host(port),
        Protocol::UDP,
    )
}

fn backend_index(service: u8) -> u32 {
    u32::from(service) * u32::from(ENDPOINTS)
}

/// Pins the calling thread to one CPU.
pub(crate) fn pin_to_cpu(cpu: u32) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(usize::try_from(cpu)?)?;
    sched_setaffinity(Pid::from_raw(0), &cpus)?;
    Ok(())
}
