//! `culvert node`: starts a node's service proxy, and the tunnel's gateway and ingress.

mod attachment_check;
mod flow_sweeper;
mod kernel_setup;
mod locks;
mod masquerade_ports;
mod socket_termination;
mod start_timer;
mod translation;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use tokio::{sync::watch, task::spawn_blocking};
use tracing::{info, warn};

use self::{kernel_setup::KernelSetup, locks::Locks, translation::start_translation};
use super::{
    RoleError, descriptor_limit, failed, node_tunnel::NodeTunnel,
    shutdown_signals::ShutdownSignals, sources::Sources,
};
use crate::{
    admin::{self, HealthCheckServer, NodeListener, NodeViews},
    bpf::Guard,
    config::Config,
    events,
    model::{ClusterUpdate, ObjectName, ObjectWarning, OwnNode},
    net::{self, NetworkFollower, NetworkSetup, NetworkState, UplinkGuard as _},
    plan::SteeringRules,
    reconcile,
    source::kube::ApiServer,
    tasks::Tasks,
};

/// The time limit for tasks to stop once the tunnel has drained.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Converts the steering config into rules for the planner; returns `None` if steering is off.
pub(super) fn steering_rules(config: &Config) -> Result<Option<SteeringRules>, RoleError> {
    let Some(steering) = &config.tunnel.steering else {
        return Ok(None);
    };
    let prefixes = steering.ranges();
    let has = |v4: bool| prefixes.iter().any(|prefix| prefix.is_v4() == v4);
    let (namespace, name) = steering
        .config_map
        .split_once('/')
        .unwrap_or(("", &steering.config_map));
    let kube = config.source.kube.iter();
    let api_servers = kube.flat_map(|kube| &kube.api_servers);
    Ok(Some(SteeringRules {
        own_node: config.node_name.clone(),
        edge_selector: steering
            .edge_node_selector
            .parse()
            .map_err(failed("cannot use tunnel.steering.edgeNodeSelector"))?,
        config_map: ObjectName::new(namespace, name),
        families: [has(true), has(false)],
        node_ranges: steering.node_ranges(),
        api_servers: api_servers.filter_map(ApiServer::ip).collect(),
    }))
}

/// Runs the daemon until SIGTERM, SIGINT or SIGHUP. The kernel programs and maps stay in place when the daemon
/// stops. If `wait` is true and another daemon uses the pin directory or `stateDir`, the daemon starts once that
/// one has exited.
///
/// # Errors
///
/// Returns an error if a startup step fails, or if a task ends unexpectedly. An earlier daemon's programs and
/// maps stay in place.
pub async fn node(config: Config, wait: bool) -> Result<(), RoleError> {
    let mut stop = ShutdownSignals::new().map_err(failed("cannot wait for signals"))?;
    let descriptor_problem = descriptor_limit::raise_and_check(&config);
    let (mut kernel, sources) = tokio::select! {
        loaded = load(&config, wait) => loaded?,
        () = stop.wait() => return Ok(()),
    };
    let mut tasks = Tasks::default();
    let (start_step, starting) = watch::channel(Some("waiting for the sources".to_owned()));
    let (network_view, network) = watch::channel(net::NetworkView::default());
    let (addresses, links) = watch_network(&config, &mut tasks, &mut kernel).await?;
    save_held_addresses(&config, &mut kernel, &mut tasks);
    let targets = kernel.reconcile_loop.steering().targets();
    let own_node = kernel.reconcile_loop.own_node();
    let pods = kernel.reconcile_loop.steering().pod_namespaces();
    let mut tunnel = NodeTunnel::open(&config, &mut tasks);
    let (sockets, attachment_view) = (watch::Sender::default(), watch::Sender::default());
    let (drain_view, stopping) = watch::channel(None);
    let packets = watch::Sender::default();
    let flows = flow_sweeper::start(&config, &kernel, packets.subscribe(), &mut tasks)?;
    let views = Arc::new(NodeViews {
        network,
        sockets: sockets.subscribe(),
        packets: packets.subscribe(),
        flows: flows.view,
        list_flows: flows.list,
        explain: kernel.explain(packets.subscribe()),
        attachment: attachment_view.subscribe(),
        stopping,
        tunnel: tunnel.view(targets.clone()),
        end_sessions: tunnel.end_sessions(),
        ..kernel.views(&config, descriptor_problem, sources.report(), starting)
    });
    serve_http(&config, &views, &mut tasks)?;
    tunnel.start_gateway(&config, sources.nodes(), &views.unbound_ports);
    let warnings = [tunnel.warnings(), flows.warnings];
    start_health_checks(&config, &kernel, (&sources, warnings), &views, &mut tasks);
    let mut store = sources.run(&mut tasks);
    let first = kernel.first_update(&mut store, &start_step);
    let first = first_update(first, (&mut stop, &mut tunnel), &mut tasks).await?;
    if let Some(first) = first {
        let attachment = kernel.write_and_attach(&config, first).await?;
        let links = classified(&config, links, &own_node).await;
        let programs = (&kernel, &attachment);
        let packet_links = (links.clone(), flows.needs);
        start_translation(&config, programs, packet_links, packets, &mut tasks);
        // The other fields stay in `kernel`, so that the pins and the state directory remain locked until
        // this function returns.
        let KernelSetup {
            data_path,
            reconcile_loop,
            ..
        } = kernel;
        let guard = data_path.guard().map_err(failed("cannot use the maps"))?;
        let guard = guard.with_attachment(attachment.clone());
        drop(data_path);
        if let Some((network, inside)) = start_steering(&config, guard, links, network_view).await?
        {
            let arrivals = (inside, flows.find_dialled);
            tunnel.start_ingress(&config, targets, arrivals, pods, &views.unbound_ports);
            tasks.start("net", network.run(tasks.draining()));
        }
        attachment_check::start(attachment, &config, attachment_view, &mut tasks);
        let removals = reconcile_loop.backend_removals();
        socket_termination::start(&config, sockets, removals, &mut tasks);
        tasks.start(
            "reconcile",
            reconcile_loop.run(store, addresses, tasks.draining()),
        );
        start_step.send_replace(None);
        tokio::select! {
            () = stop.wait() => {}
            name = tunnel.ended() => return Err(RoleError::TaskEnded { name }),
            name = tasks.ended() => return Err(RoleError::TaskEnded { name }),
        }
    }
    drain(tunnel, &drain_view, &mut stop, &mut tasks).await?;
    info!("stopping: the kernel programs and maps stay in place");
    start_step.send_replace(Some("stopping".to_owned()));
    tasks.finish(STOP_TIMEOUT).await;
    Ok(())
}

/// The problems that an operator must fix, as a part of the daemon publishes them.
type Warnings = watch::Receiver<Arc<[ObjectWarning]>>;

/// Starts the server of the health check node ports, and the task that creates Events.
fn start_health_checks(
    config: &Config,
    kernel: &KernelSetup,
    (sources, warnings): (&Sources, [Warnings; 2]),
    views: &Arc<NodeViews>,
    tasks: &mut Tasks,
) {
    let checks = kernel.reconcile_loop.health_checks();
    let health_checks = HealthCheckServer::new(checks, Arc::clone(views), tasks.draining());
    let inputs = events::EventInputs {
        warnings: [kernel.reconcile_loop.warnings(), health_checks.warnings()]
            .into_iter()
            .chain(warnings)
            .collect(),
        unbound_ports: views.unbound_ports.subscribe(),
    };
    sources.start_events(config, inputs, tasks);
    tasks.start("health checks", health_checks.run());
}

/// Drains the tunnel. Services are still programmed meanwhile, because the next daemon can't start before this one
/// has exited. Another signal ends the drain.
async fn drain(
    tunnel: NodeTunnel,
    view: &watch::Sender<Option<String>>,
    stop: &mut ShutdownSignals,
    tasks: &mut Tasks,
) -> Result<(), RoleError> {
    let Some(reason) = tunnel.drain_reason() else {
        return Ok(());
    };
    info!("{reason}");
    view.send_replace(Some(reason));
    tokio::select! {
        () = Box::pin(tunnel.drain()) => Ok(()),
        () = stop.wait() => {
            warn!("another signal has ended the drain");
            Ok(())
        }
        name = tasks.ended() => Err(RoleError::TaskEnded { name }),
    }
}

/// Waits for the first update, and logs it. Returns `None` if the daemon is to stop.
async fn first_update(
    first: impl Future<Output = Result<Option<ClusterUpdate>, RoleError>> + Send,
    (stop, tunnel): (&mut ShutdownSignals, &mut NodeTunnel),
    tasks: &mut Tasks,
) -> Result<Option<ClusterUpdate>, RoleError> {
    let name = tokio::select! {
        update = first => match update? {
            Some(update) => {
                log_first_update(&update);
                return Ok(Some(update));
            }
            None => tasks.ended().await,
        },
        () = stop.wait() => return Ok(None),
        name = tunnel.ended() => name,
        name = tasks.ended() => name,
    };
    Err(RoleError::TaskEnded { name })
}

fn log_first_update(first: &ClusterUpdate) {
    let services = first.services.len();
    let message = if first.stale {
        "starting with the last snapshot, since the API server does not respond"
    } else {
        "every source has delivered its first complete list"
    };
    info!(services, "{message}");
}

/// Loads the data path and opens the sources, once no other daemon is in the way.
async fn load(config: &Config, wait: bool) -> Result<(KernelSetup, Sources), RoleError> {
    let locks = Locks::take(config, wait).await?;
    tokio::try_join!(load_data_path(config, locks), Sources::start(config))
}

/// Loads the programs and maps on a blocking thread, since reading many map entries would delay other tasks.
async fn load_data_path(config: &Config, locks: Locks) -> Result<KernelSetup, RoleError> {
    let config = config.clone();
    let loaded = spawn_blocking(move || KernelSetup::load(&config, locks)).await;
    loaded.map_err(failed("cannot load the data path"))?
}

/// Starts the task that watches the node's addresses and, for steering, its links and routes.
async fn watch_network(
    config: &Config,
    tasks: &mut Tasks,
    kernel: &mut KernelSetup,
) -> Result<(Addresses, watch::Receiver<NetworkState>), RoleError> {
    // Attaches nothing. Programs that log may still replace the guard.
    let guard = kernel.data_path.guard();
    let mut guard = guard.map_err(failed("cannot use the maps"))?;
    let classifier = needs_links(config).then(|| net::LinkClassifier {
        settings: link_settings(config),
        own_node: kernel.reconcile_loop.own_node(),
        former_uplinks: guard.guarded_links(),
    });
    let follower = NetworkFollower::open(classifier)
        .await
        .map_err(failed("cannot list the links and addresses of this node"))?;
    let (addresses, network) = (follower.addresses(), follower.network());
    // The map is an earlier process's. Connections to prefixes that have no route any more, or none yet, must not leave
    // this node.
    let steering = config.tunnel.steering.as_ref();
    let routed = steering.map_or([false; 2], |steering| {
        let state = network.borrow();
        state.routed_families(&steering.ranges(), steering.route_protocol)
    });
    let written = guard.set_steering(routed);
    written.map_err(failed("cannot use the maps"))?;
    kernel.reconcile_loop.set_addresses(&addresses.borrow());
    kernel.reconcile_loop.follow_networks(follower.networks());
    tasks.start("links", follower.run(tasks.draining()));
    Ok((addresses, network))
}

/// Returns true if the links are classified.
const fn needs_links(config: &Config) -> bool {
    config.tunnel.steering.is_some() || config.service.packets.enabled
}

/// Waits until the links are classified by the Node object in the first update, if they are classified at all, and returns the
/// network. Without the wait, the first check could replace the pod ranges that an earlier process has stored by none.
async fn classified(
    config: &Config,
    mut network: watch::Receiver<NetworkState>,
    own_node: &watch::Receiver<Arc<OwnNode>>,
) -> watch::Receiver<NetworkState> {
    if needs_links(config) {
        let own_node = Arc::clone(&own_node.borrow());
        net::wait_until_classified(&mut network, &own_node).await;
    }
    network
}

fn link_settings(config: &Config) -> net::LinkSettings {
    let service = &config.service;
    net::LinkSettings {
        uplinks: service.uplinks.clone(),
        pod_links: service.pod_links.clone(),
        pod_ranges: service.pod_ranges(),
    }
}

/// Starts the task that saves which edge node holds each address.
fn save_held_addresses(config: &Config, kernel: &mut KernelSetup, tasks: &mut Tasks) {
    if config.tunnel.steering.is_some() {
        let path = reconcile::held_addresses_path(&config.state_dir);
        let holders = kernel.reconcile_loop.steering().holders();
        let saving = reconcile::save_held_addresses(path, holders, tasks.draining());
        tasks.start("node addresses", saving);
    }
}

/// This node's current addresses.
type Addresses = watch::Receiver<Arc<BTreeSet<IpAddr>>>;

/// Guards the uplinks and adds the routes for the steering prefixes. If steering is off, removes the guards
/// and routes left by an earlier process.
async fn start_steering(
    config: &Config,
    guard: Guard,
    links: watch::Receiver<NetworkState>,
    view: watch::Sender<net::NetworkView>,
) -> Result<Option<SteeringNetwork>, RoleError> {
    let record = net::record_path(&config.state_dir);
    let Some(steering) = &config.tunnel.steering else {
        if let Err(error) = NetworkSetup::clear(guard, &record).await {
            let error = &error as &dyn std::error::Error;
            warn!(
                error,
                "cannot remove the guards and routes of an earlier process"
            );
        }
        return Ok(None);
    };
    let settings = net::NetworkSettings {
        names_uplinks: !config.service.uplinks.is_empty(),
        prefixes: steering.ranges(),
        protocol: steering.route_protocol,
        check_interval: config.bpf.check_interval,
        record,
    };
    let mut network = NetworkSetup::open(settings, guard, links, view)
        .map_err(failed("cannot change the network"))?;
    network.check(false).await;
    let inside = network.inside_links();
    Ok(Some((network, inside)))
}

/// The task that maintains the guards and routes, and the links from which the ingress accepts connections.
type SteeringNetwork = (NetworkSetup<Guard>, watch::Receiver<Arc<BTreeSet<u32>>>);

/// Starts the HTTP servers on the admin socket, the admin port and the health port, and the task that logs changes
/// of the node's readiness.
fn serve_http(config: &Config, views: &Arc<NodeViews>, tasks: &mut Tasks) -> Result<(), RoleError> {
    let readiness = admin::log_readiness(Arc::clone(views), tasks.draining());
    tasks.start("readiness", readiness);
    let routes = |listener| admin::NodeRoutes::new(listener, Arc::clone(views));
    let socket = routes(NodeListener::Socket);
    // If the disk is full, the daemon still programs Services, and its ports show the reason.
    let retries = views.setup.state_dir_problem.is_some();
    let waiting = views.unbound_ports.clone();
    let path = config.admin_socket();
    let socket = admin::serve_unix(&path, socket, retries, waiting, tasks.draining());
    let socket = socket.map_err(failed("cannot serve the admin socket"))?;
    tasks.start(NodeListener::Socket.name(), socket);
    for (listener, address) in [
        (NodeListener::Admin, config.admin.address),
        (NodeListener::Healthz, config.healthz.address),
    ] {
        let (name, waiting) = (listener.name(), views.unbound_ports.clone());
        let port = admin::serve_tcp(name, address, routes(listener), waiting, tasks.draining());
        tasks.start(name, port);
    }
    Ok(())
}
