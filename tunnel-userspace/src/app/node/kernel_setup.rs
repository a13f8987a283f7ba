//! Starts the data path: loads the programs and maps, writes the first sync, and attaches the programs.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::watch, time::interval};
use tracing::{error, info, warn};
use tunnel_common::{
    LAYOUT_VERSION,
    table::{MapGroup, MapSizes},
};

use super::{
    attachment_check::HEARTBEAT_CHECKS, locks::Locks, masquerade_ports, start_timer::StartTimer,
    steering_rules,
};
use crate::{
    admin::{Explain, Getter, NodeSetup, NodeViews, TunnelView},
    app::{
        RoleError, cgroup_of, failed, other_error,
        state_dir::StateDir,
        translation_probe::{self, ProbeError, SteeringProbe},
    },
    bpf::{
        self, Attachment, Counters, DaemonHeartbeat, DataPath, Features, KernelFlows, KernelLog,
        KernelMaps, KernelSteering, LoggingProgram, PacketSettings, PinDirectory, ProgramSettings,
        RcuGrace, StrayPrograms,
    },
    clock::since_boot,
    config::{self, Config, ServiceConfig},
    error_chain::chain,
    explain::Explainer,
    model::ClusterUpdate,
    net::{Listeners, PacketsView},
    reconcile::{
        self, DialProbe, ListenerPollError, PlanSettings, PublishedServices, ReadError,
        ReconcileLoop, Reconciler, SteeringReconciler, SteeringSettings,
    },
    source::{SourceReport, Store},
};

/// The loaded programs and maps, and the loop that owns the maps.
pub(super) struct KernelSetup {
    cgroup: PathBuf,
    features: Features,
    pub(super) data_path: DataPath,
    counters: Arc<Counters>,
    pub(super) reconcile_loop: ReconcileLoop<KernelMaps, KernelSteering, RcuGrace>,
    /// Measures how long each startup step takes.
    start_timer: StartTimer,
    /// The kernel program that logs events. Dropping it puts the normal program back in its place.
    logging_program: Option<LoggingProgram>,
    /// The kernel program whose events are logged, if any.
    kernel_log: watch::Sender<Option<KernelLog>>,
    /// The pin directory, locked so that no second daemon can use it.
    pub(super) pins: Arc<PinDirectory>,
    /// The programs of an earlier Culvert that are not pinned in the pin directory.
    strays: StrayPrograms,
    state: StateDir,
    heartbeat: Arc<DaemonHeartbeat>,
    /// The interval between two heartbeats.
    check_interval: Duration,
}

/// Returns the sizes in the config. Maps that are not needed get the minimum size: the steering maps would otherwise take up
/// a fifth of all maps' memory.
fn map_sizes(config: &Config) -> MapSizes {
    let is_needed = |group| match group {
        MapGroup::Steering => config.tunnel.steering.is_some(),
        MapGroup::Flows | MapGroup::Fragments => config.service.packets.enabled,
        MapGroup::Services | MapGroup::Affinity | MapGroup::SharedTranslations => true,
    };
    let unneeded = MapGroup::ALL.into_iter().filter(|group| !is_needed(*group));
    unneeded.fold(config.bpf.maps, MapSizes::without)
}

/// Returns the settings of the programs that translate packets, or `None` if they are off.
fn packet_settings(service: &ServiceConfig) -> Option<PacketSettings> {
    let config = &service.packets;
    config.enabled.then(|| PacketSettings {
        timeouts: config.timeouts.for_programs(),
        fragment_timeout: config.timeouts.fragments_for_programs(),
        ports: config.port_range().unwrap_or_else(masquerade_ports::choose),
        refusals_per_second: config.refusals_per_second,
        masquerade_all: service.masquerade_all,
        redirect: !config.redirecting_uplinks().is_empty(),
    })
}

impl KernelSetup {
    /// Checks the kernel, opens or creates the maps, and reads their content. Writes no entries and attaches
    /// no programs.
    pub(super) fn load(config: &Config, locks: Locks) -> Result<Self, RoleError> {
        let mut start_timer = StartTimer::start();
        let cgroup = cgroup_of(config)?;
        bpf::check_cgroup(&cgroup).map_err(failed("cannot use bpf.cgroup"))?;
        let Locks { pins, state } = locks;
        let features = bpf::probe().map_err(failed("cannot probe the kernel"))?;
        info!(?features, "probed the kernel");
        let strays = bpf::take_over_strays(&pins, &cgroup).map_err(other_error)?;
        let steering = config.tunnel.steering.as_ref();
        let prefixes = steering
            .map(config::SteeringConfig::ranges)
            .unwrap_or_default();
        let switches = ProgramSettings {
            own_mark: config.tunnel.socket_mark,
            prefixes: prefixes.clone(),
            packets: packet_settings(&config.service),
        };
        let data_path = DataPath::load(&pins, map_sizes(config), features, &switches, since_boot())
            .map_err(failed("cannot load the data path"))?;
        let sizes = data_path.sizes();
        let (maps, counters) = data_path
            .open_maps()
            .map_err(failed("cannot use the maps"))?;
        let grace =
            RcuGrace::new().map_err(failed("cannot create the map for RCU grace periods"))?;
        let steering_settings = SteeringSettings {
            rules: steering_rules(config)?,
            prefixes,
            ingress_port: steering.map_or(0, |steering| steering.ingress_port),
        };
        let steering = data_path
            .open_steering()
            .map_err(failed("cannot use the maps"))?;
        let mut steering =
            SteeringReconciler::adopt(steering, sizes, steering_settings, since_boot())
                .map_err(failed("cannot read the steering maps"))?;
        let held_addresses = reconcile::held_addresses_path(&config.state_dir);
        steering.restore_holders(reconcile::read_held_addresses(&held_addresses));
        let reconciler = Reconciler::adopt(maps, sizes, &grace, plan_settings(config))
            .map_err(failed("cannot read the maps"))?;
        let mut reconcile_loop = ReconcileLoop::new(
            reconciler,
            steering,
            grace,
            config.service.full_sync_interval,
        );
        if config.service.packets.enabled {
            let addresses = data_path.adopt_addresses();
            let addresses = addresses.map_err(failed("cannot read the maps"))?;
            reconcile_loop.write_cluster_addresses(addresses);
        }
        reconcile_loop.enable_listener_poll(
            local_listener_finder(),
            config.service.local_listener_poll_interval,
        );
        reconcile_loop.enable_probe(
            translation_probe::frontend(),
            probe_dialer(&cgroup),
            config.bpf.test_connection_interval,
        );
        start_timer.finish_step(|times| &mut times.load);
        let pins = Arc::new(pins);
        let heartbeat = data_path
            .heartbeat(Arc::clone(&pins))
            .map_err(failed("cannot use the maps"))?;
        heartbeat.beat(config.bpf.check_interval * HEARTBEAT_CHECKS);
        Ok(Self {
            cgroup,
            features,
            data_path,
            counters: Arc::new(counters),
            reconcile_loop,
            start_timer,
            logging_program: None,
            kernel_log: watch::Sender::default(),
            pins,
            strays,
            state,
            heartbeat: Arc::new(heartbeat),
            check_interval: config.bpf.check_interval,
        })
    }

    /// Opens the map of flows.
    pub(super) fn flows(&self) -> Result<KernelFlows, ReadError> {
        self.data_path.flows()
    }

    /// Returns the kernel programs' counters.
    pub(super) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Returns the function that explains packets and connections.
    pub(super) fn explain(&self, packets: watch::Receiver<PacketsView>) -> Explain {
        let pins = Arc::clone(&self.pins);
        let trials = self.data_path.packet_trials(Arc::clone(&pins));
        let explainer = Explainer::new(pins, trials, self.published_services(), packets);
        let explainer = Arc::new(explainer);
        Box::new(move |question| {
            let explainer = Arc::clone(&explainer);
            Box::pin(async move { explainer.explain(&question).await })
        })
    }

    /// Returns the published state of the Services.
    pub(super) fn published_services(&self) -> PublishedServices {
        self.reconcile_loop.published().clone()
    }

    /// Returns the views for the HTTP endpoints. Views that other modules publish are still empty.
    pub(super) fn views(
        &self,
        config: &Config,
        descriptor_problem: Option<String>,
        source: Getter<SourceReport>,
        starting: watch::Receiver<Option<String>>,
    ) -> NodeViews {
        let sizes = self.data_path.sizes();
        let maps = sizes
            .by_key()
            .map(|(field, entries)| (field.to_owned(), entries));
        let choose = |has, yes: &str, no: &str| String::from(if has { yes } else { no });
        let shows_addresses = self.features.kernel_offsets.is_some();
        let setup = NodeSetup {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            node: config.node_name.clone(),
            started: jiff::Timestamp::now().to_string(),
            cgroup: self.cgroup.display().to_string(),
            pins: self.pins.root().display().to_string(),
            layout: LAYOUT_VERSION,
            refusal_method: choose(self.features.set_retval, "bpf_set_retval", "rewrite"),
            client_identity: choose(shows_addresses, "address", "network namespace"),
            maps: maps.collect(),
            state_dir_problem: self.state.problem.clone(),
            descriptor_problem,
        };
        let [
            service_counters,
            port_counters,
            reason_counters,
            socket_counters,
        ] = [(); 4].map(|()| Arc::clone(&self.counters));
        let services = self.reconcile_loop.published().clone();
        let (ports, limit) = (services.clone(), config.admin.service_metrics_limit);
        let read_counters = move || {
            reason_counters.read().unwrap_or_else(|error| {
                warn!(%error, "cannot read the kernel's counters");
                Vec::new()
            })
        };
        NodeViews {
            setup,
            config: config.effective(),
            starting,
            start_times: self.start_timer.times(),
            stats: self.reconcile_loop.stats(),
            heartbeat: self.reconcile_loop.heartbeat(),
            kernel_log: self.kernel_log.subscribe(),
            services: Box::new(move |name| {
                Box::new(services.service_parts(Arc::clone(&service_counters), name))
            }),
            port_counts: Box::new(move || ports.port_counters(&*port_counters, limit)),
            attachment: watch::Sender::default().subscribe(),
            stopping: watch::Sender::default().subscribe(),
            packets: watch::Sender::default().subscribe(),
            flows: watch::Sender::default().subscribe(),
            list_flows: Box::new(|_| Box::new(std::iter::empty())),
            explain: Box::new(|_| Box::pin(async { Err("not ready".to_owned()) })),
            network: watch::Sender::default().subscribe(),
            sockets: watch::Sender::default().subscribe(),
            tunnel: Box::new(TunnelView::default),
            end_sessions: Box::new(|_| 0),
            source_report: source,
            kernel_counters: Box::new(read_counters),
            open_connections: Box::new(move || socket_counters.connections()),
            unbound_ports: watch::Sender::new(BTreeMap::new()),
            health_checks: watch::Sender::default(),
            health_responses: watch::Sender::default(),
        }
    }

    /// Waits for the first update after which the programs can be attached; returns `None` if the sources
    /// end. Normally, that is the very first update. If the maps replace maps with an older layout, the
    /// update must be complete: until then, updates are only written to the new maps, and the attached
    /// programs keep using the old maps.
    pub(super) async fn first_update(
        &mut self,
        store: &mut Store,
        starting: &watch::Sender<Option<String>>,
    ) -> Result<Option<ClusterUpdate>, RoleError> {
        let mut beats = interval(self.check_interval);
        loop {
            // The programs of an earlier process are in effect meanwhile.
            let update = tokio::select! {
                biased;
                update = store.update() => update,
                _ = beats.tick() => {
                    self.heartbeat.beat(self.check_interval * HEARTBEAT_CHECKS);
                    continue;
                }
            };
            let Some(update) = update else {
                return Ok(None);
            };
            if update.complete || !self.data_path.is_empty() {
                self.start_timer.finish_step(|times| &mut times.sync);
                return Ok(Some(update));
            }
            error!(
                "keeping the programs and maps of the older layout: an object is invalid, or the API server does not respond"
            );
            starting.send_replace(Some(
                "waiting for a complete and valid list of objects, to replace an older layout"
                    .to_owned(),
            ));
            let step = "cannot write the new maps next to those of an older layout";
            self.reconcile_loop
                .apply(update)
                .await
                .map_err(failed(step))?;
            self.reconcile_loop
                .free_retired()
                .await
                .map_err(failed(step))?;
        }
    }

    /// Writes the first update to the maps, attaches the programs, and verifies them with a test connection.
    /// Returns a value that keeps the programs attached.
    pub(super) async fn write_and_attach(
        &mut self,
        config: &Config,
        first: ClusterUpdate,
    ) -> Result<Attachment, RoleError> {
        let applied = self.reconcile_loop.apply(first).await;
        applied.map_err(failed("cannot write the maps"))?;
        if self.reconcile_loop.is_content_unknown() {
            let error = io::Error::other("their content is unknown after a failed write");
            return Err(failed("cannot write the maps")(error));
        }
        self.start_timer.finish_step(|times| &mut times.write);
        self.data_path
            .promote(&self.pins)
            .map_err(failed("cannot use bpf.bpffs"))?;
        let attached = self
            .data_path
            .attach(&self.cgroup)
            .map_err(failed("cannot attach the programs"))?;
        info!(new = attached.new_links(), replaced = attached.replaced(), cgroup = %self.cgroup.display(), "programs attached");
        let probed = self
            .reconcile_loop
            .dial_probe(&translation_probe::frontend(), || {
                translation_probe::connect_service(&self.cgroup)
            });
        let probe_result = probed.unwrap_or_else(|| {
            warn!("probe skipped: a Service has the frontend of the probe, or open connections use all spare entries of the maps");
            Ok(())
        });
        if probe_result.is_ok()
            && let Err(error) = self.record_host_namespace(config.tunnel.socket_mark)
        {
            // The daemon still works, except that sockets bound to a device are not steered, and node ports
            // are not served on loopback.
            let error = &error as &dyn std::error::Error;
            warn!(error, "cannot determine the host's network namespace");
        }
        // If the probe failed, dropping `attached` detaches the programs that are not pinned yet.
        probe_result
            .map_err(|error: ProbeError| failed("the probe of the programs failed")(error))?;
        let attachment = self
            .data_path
            .hold(
                attached,
                Arc::clone(&self.pins),
                &self.cgroup,
                Arc::clone(&self.heartbeat),
            )
            .map_err(failed("cannot pin the programs"))?;
        self.detach_strays();
        self.merge_replaced_counts();
        self.start_timer.finish_step(|times| &mut times.attach);
        self.start_event_log(config.log.kernel.as_ref(), &attachment);
        Ok(attachment)
    }

    /// Detaches the programs of an earlier Culvert that are not pinned in the pin directory. A failure is only
    /// logged, because the check of the programs reports those that stay.
    fn detach_strays(&self) {
        match self.strays.detach() {
            Ok(0) => {}
            Ok(programs) => warn!(
                programs,
                "detached the programs of an earlier Culvert that were not pinned in bpf.bpffs"
            ),
            Err(error) => warn!(%error, "cannot detach the programs of an earlier Culvert"),
        }
    }

    /// Adds the counts in the replaced maps to those in the new maps. If that fails, the replaced maps must stay in place, and
    /// the daemon tries again at its next start.
    fn merge_replaced_counts(&mut self) {
        let copied = RcuGrace::new().and_then(|grace| self.data_path.merge_replaced_counts(&grace));
        if let Err(error) = copied {
            warn!(%error, "cannot copy the counts of the replaced maps");
        }
    }

    /// Starts logging the events of the kernel program that `log.kernel` names, if any. A failure is only
    /// logged.
    fn start_event_log(&mut self, wanted: Option<&KernelLog>, attachment: &Attachment) {
        let Some(wanted) = wanted else { return };
        let KernelLog { program, level } = wanted;
        match self.data_path.enable_logging(wanted, attachment) {
            Ok(logging) => {
                info!(program, up_to = %level, "logging the events of a kernel program");
                self.kernel_log.send_replace(Some(wanted.clone()));
                self.logging_program = Some(logging);
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                warn!(
                    error,
                    "cannot log the events of the kernel program; log.kernel has no effect"
                );
            }
        }
    }

    /// Calls connect() once, so that the programs record this process's network namespace as the host's.
    fn record_host_namespace(&mut self, mark: u32) -> Result<(), RoleError> {
        let steering = self.reconcile_loop.steering();
        let key = translation_probe::steering_key();
        let probe =
            SteeringProbe::new(mark).map_err(failed("cannot create the socket of the probe"))?;
        let own_cookie = probe
            .cookie()
            .map_err(failed("cannot read the cookie of the probe's socket"))?;
        steering
            .write_probe_key(&key, own_cookie)
            .map_err(failed("cannot write the steering maps"))?;
        // The heartbeat is in the same record.
        self.heartbeat.beat(self.check_interval * HEARTBEAT_CHECKS);
        let is_refused = probe.connect();
        let namespace = steering
            .remove_probe_key(&key)
            .map_err(failed("cannot use the steering maps"))?;
        if !is_refused || namespace == 0 {
            return Err(failed("the steering probe failed")(
                "the programs recorded no connect of this process",
            ));
        }
        Ok(())
    }
}

/// Returns the settings for plans.
fn plan_settings(config: &Config) -> PlanSettings {
    PlanSettings {
        node_name: config.node_name.clone(),
        algorithm: config.service.algorithm,
        node_port_addresses: config.service.node_ports(),
        external_ips: config.service.external_ips,
        node_addresses: config.service.node_addresses,
        topology_keys: config.service.topology_keys,
        namespace_share: config.service.namespace_share,
        translates_packets: config.service.packets.enabled,
        local_listeners: config.service.local_listeners.iter().copied().collect(),
    }
}

/// Returns a function that dials the probe's frontend.
fn probe_dialer(cgroup: &Path) -> DialProbe {
    let cgroup = cgroup.to_owned();
    Box::new(move || {
        translation_probe::connect_service(&cgroup)
            .map_err(|error| format!("the probe of the programs failed: {}", chain(&error)))
    })
}

/// Returns a function that is given a set of frontends and returns the ones on whose address a local process
/// is listening.
fn local_listener_finder() -> reconcile::FindListeners {
    let mut listeners = Listeners::default();
    Box::new(move |fronts| {
        listeners.find(fronts).map_err(|error| ListenerPollError {
            is_retryable: error.is_retryable(),
            source: error.into(),
        })
    })
}
