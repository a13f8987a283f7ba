//! Lists and watches Services, EndpointSlices, Nodes, ServiceCIDRs and one ConfigMap on the API server, using
//! the same selectors as kube-proxy 1.36 (`cmd/kube-proxy/app/server.go`, `ProxyServer.Run`).

mod client;
mod reflector;
mod snapshot;
mod watcher;

use std::{collections::BTreeSet, io, path::PathBuf, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::{
    core::v1::{ConfigMap, Node, Pod, Service},
    discovery::v1::EndpointSlice,
    networking::v1::ServiceCIDR,
};
use kube::{Client, Resource};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinError, JoinSet, spawn_blocking},
    time::{Instant, sleep_until},
};
use tracing::{info, warn};

pub use self::client::{AccessError, ApiServer, InvalidApiServer};
use self::{
    client::CurrentServer,
    reflector::{NodeFilter, Reflector},
    snapshot::Snapshot,
    watcher::{KindEvent, KindWatcher},
};
use super::{Overlay, ServerStatus, SourceReport, problem_log::ProblemLog, store::SyncPhase};
use crate::{
    clock::monotonic,
    drain, duration,
    events::EventSettings as Events,
    k8s::{self, ApiObject, ReceivedObject},
    model::{Kind, NODE_POOL_LABEL, ObjectName, ObjectWarning, ZONE_LABEL},
    publish,
};

/// The label selector for Services that are not assigned to another proxy.
const NOT_OF_OTHER_PROXY: &str = "!service.kubernetes.io/service-proxy-name";
/// The field selector for Services that are not headless.
const NOT_HEADLESS: &str = "spec.clusterIP!=None";
/// The label selector for EndpointSlices that do not belong to headless Services.
const NOT_OF_HEADLESS: &str = "!service.kubernetes.io/headless";

/// The capacity of the channel for events from the watchers.
const EVENT_BUFFER: usize = 1024;

/// Time limits for misbehaving servers. They are constant, except in tests.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The longest that a response other than a watch may go without sending any data.
    max_silence: Duration,
    /// The time for which lists older than the last version seen are rejected. A lagging server catches up
    /// within seconds, but a server that was restored from a backup does not, so its lists are accepted after
    /// this time.
    max_lag: Duration,
    /// The timeout for a request that probes whether the server responds again.
    probe_timeout: Duration,
    /// The longest that a watch may stay open beyond its requested duration. After that, the server or a
    /// proxy in front of it must have lost the watch.
    watch_overtime: Duration,
}

const LIMITS: Limits = Limits {
    max_silence: Duration::from_secs(60),
    max_lag: Duration::from_secs(60),
    probe_timeout: Duration::from_secs(30),
    watch_overtime: Duration::from_secs(30),
};

/// The settings for the `kube` source, which reads from the API server.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct KubeSettings {
    /// The path of the kubeconfig. Without one, the pod's service account is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The addresses of the API servers, which override the address in the kubeconfig or in the pod's
    /// environment. The address in the environment is that of a Service, which this node can't reach until it
    /// has received the Services.
    pub api_servers: Vec<ApiServer>,
    /// The timeout for establishing a TCP connection.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub connect_timeout: Duration,
    /// The duration of each watch, at most 290 s.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub watch_timeout: Duration,
    /// The maximum backoff between two attempts to reach the server.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub max_backoff: Duration,
    /// The number of objects per page when the server can't stream lists.
    pub page_size: u32,
    /// The time to wait for the server after startup before falling back to the last known state.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub initial_sync_timeout: Duration,
    /// The minimum interval between two writes of the last known state to disk.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub snapshot_interval: Duration,
    /// The settings for Kubernetes Events that report problems.
    pub events: Events,
}

impl Default for KubeSettings {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            api_servers: Vec::new(),
            connect_timeout: Duration::from_secs(5),
            watch_timeout: Duration::from_secs(290),
            max_backoff: Duration::from_secs(10),
            page_size: 500,
            initial_sync_timeout: Duration::from_secs(3),
            snapshot_interval: Duration::from_secs(10),
            events: Events::default(),
        }
    }
}

/// Creates a client for the API servers.
///
/// # Errors
///
/// Returns an error if the credentials can't be used.
pub async fn client(settings: &Arc<KubeSettings>) -> Result<Client, AccessError> {
    let (client, _) = client::connect(settings, LIMITS.max_silence).await?;
    Ok(client)
}

/// The objects that a node reads from the API server.
#[derive(Clone, Debug, Default)]
pub struct KubeScope {
    /// The name of this node.
    pub node: String,
    /// The objects needed for steering; `None` if steering is off.
    pub steering: Option<SteeringScope>,
    /// True if external IPs are served only if the cluster owns them (`service.externalIPs: owned`). In that
    /// case, all Nodes are read, and so are the Services of other proxies, for their load balancers'
    /// addresses.
    pub owned_external_ips: bool,
    /// True if packets are translated (`service.packets.enabled`). In that case, the Services of other proxies are read, because
    /// packets to their cluster IPs are left alone.
    pub packets: bool,
    /// True if node pools are in use (`service.topologyKeys: honor`). In that case, all Nodes are read.
    pub node_pools: bool,
    /// The path of the file that holds the last known state.
    pub snapshot: PathBuf,
}

/// The objects that steering needs.
#[derive(Clone, Debug)]
pub struct SteeringScope {
    /// The keys of the labels by which edge nodes are selected.
    pub labels: BTreeSet<String>,
    /// The name of the ConfigMap that lists additional ports to steer.
    pub config_map: ObjectName,
    /// True if this node's Pods are read, since only those of some namespaces may use the ingress.
    pub pods: bool,
}

/// A selection of objects of one kind to list and watch.
#[derive(Clone, Debug)]
struct Selection {
    kind: Kind,
    /// The URL path of the collection.
    path: String,
    labels: Option<String>,
    fields: Option<String>,
    /// The function that parses an object of this kind.
    parse: fn(&str) -> serde_json::Result<ReceivedObject>,
}

impl Selection {
    /// Selects objects by labels and fields, in one namespace or in all namespaces.
    fn new<K: ApiObject + Resource<DynamicType = ()>>(
        namespace: Option<&str>,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Self {
        Self {
            kind: K::MODEL_KIND,
            path: K::url_path(&(), namespace),
            labels: labels.map(str::to_owned),
            fields: fields.map(str::to_owned),
            parse: k8s::parse_received::<K>,
        }
    }
}

impl KubeScope {
    /// Returns the selections, one for each kind.
    fn selections(&self) -> Vec<Selection> {
        let needs_own_node_only =
            self.steering.is_none() && !self.owned_external_ips && !self.node_pools;
        let own = needs_own_node_only.then(|| format!("metadata.name={}", self.node));
        let needs_all_services = self.owned_external_ips || self.packets;
        let labels = (!needs_all_services).then_some(NOT_OF_OTHER_PROXY);
        let mut selections = vec![
            Selection::new::<Service>(None, labels, Some(NOT_HEADLESS)),
            Selection::new::<EndpointSlice>(None, Some(NOT_OF_HEADLESS), None),
            Selection::new::<Node>(None, None, own.as_deref()),
            Selection::new::<ServiceCIDR>(None, None, None),
        ];
        if let Some(SteeringScope {
            config_map, pods, ..
        }) = &self.steering
        {
            let ObjectName { namespace, name } = config_map;
            let field = format!("metadata.name={name}");
            selections.push(Selection::new::<ConfigMap>(
                Some(namespace),
                None,
                Some(&field),
            ));
            let field = format!("spec.nodeName={}", self.node);
            selections.extend(pods.then(|| Selection::new::<Pod>(None, None, Some(&field))));
        }
        selections
    }

    fn node_filter(&self) -> NodeFilter {
        let mut labels = BTreeSet::from([ZONE_LABEL.to_owned()]);
        labels.extend(self.node_pools.then(|| NODE_POOL_LABEL.to_owned()));
        let steering = self.steering.iter();
        labels.extend(steering.flat_map(|steering| steering.labels.iter().cloned()));
        NodeFilter {
            own: self.node.clone(),
            labels,
        }
    }
}

/// Creates the source, even if the API server can't be reached. Call [`KubeSource::run`] to list and watch
/// objects.
///
/// # Errors
///
/// Returns an error if the kubeconfig or the pod's service account can't be used.
pub async fn start(
    settings: KubeSettings,
    scope: KubeScope,
    overlay: Overlay,
) -> Result<KubeSource, AccessError> {
    start_with_limits(LIMITS, settings, scope, overlay).await
}

async fn start_with_limits(
    limits: Limits,
    settings: KubeSettings,
    scope: KubeScope,
    overlay: Overlay,
) -> Result<KubeSource, AccessError> {
    let settings = Arc::new(settings);
    let (client, current) = client::connect(&settings, limits.max_silence).await?;
    let kinds = scope
        .selections()
        .into_iter()
        .map(|selection| selection.kind);
    let mut source = KubeSource {
        client,
        current,
        reflector: Reflector::new(kinds, scope.node_filter()),
        overlay,
        report: watch::Sender::default(),
        warnings: watch::Sender::new(Arc::default()),
        problem_log: ProblemLog::default(),
        limits,
        settings,
        scope,
    };
    source.publish();
    Ok(source)
}

/// The source that reads objects from the API server.
pub struct KubeSource {
    client: Client,
    current: CurrentServer,
    settings: Arc<KubeSettings>,
    scope: KubeScope,
    limits: Limits,
    reflector: Reflector,
    overlay: Overlay,
    report: watch::Sender<Arc<SourceReport>>,
    warnings: watch::Sender<Arc<[ObjectWarning]>>,
    problem_log: ProblemLog,
}

impl KubeSource {
    /// Returns a receiver for the source's report.
    #[must_use]
    pub fn report(&self) -> watch::Receiver<Arc<SourceReport>> {
        self.report.subscribe()
    }

    /// Returns a receiver for the current warnings.
    #[must_use]
    pub fn warnings(&self) -> watch::Receiver<Arc<[ObjectWarning]>> {
        self.warnings.subscribe()
    }

    /// Returns a client for the API server.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Lists and watches objects, and writes the changes to the overlay, until draining begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let (sender, mut events) = mpsc::channel(EVENT_BUFFER);
        // Dropping the set aborts the watchers.
        let mut watchers = JoinSet::new();
        for selection in self.scope.selections() {
            let watcher = KindWatcher {
                client: self.client.clone(),
                selection,
                settings: Arc::clone(&self.settings),
                limits: self.limits,
                current: self.current.clone(),
                events: sender.clone(),
            };
            watchers.spawn(watcher.run());
        }
        let snapshot_at = Instant::now() + self.settings.initial_sync_timeout;
        let mut save_at = Instant::now() + self.settings.snapshot_interval;
        let mut batch = Vec::with_capacity(EVENT_BUFFER);
        // Snapshots are written on a separate thread, since the disk may be slow.
        let mut saving = JoinSet::new();
        loop {
            let is_listing = self.overlay.phase() == SyncPhase::Listing;
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                count = events.recv_many(&mut batch, EVENT_BUFFER) => {
                    if count == 0 {
                        break;
                    }
                    self.apply_events(batch.drain(..));
                    self.publish();
                }
                () = sleep_until(snapshot_at), if is_listing => {
                    self.use_snapshot().await;
                    self.publish();
                }
                Some(result) = saving.join_next() => self.record_save(result),
                () = sleep_until(save_at), if saving.is_empty() && self.needs_save() => {
                    save_at = Instant::now() + self.settings.snapshot_interval;
                    saving.spawn_blocking(self.save_snapshot());
                }
            }
        }
        if let Some(result) = saving.join_next().await {
            self.record_save(result);
        }
        if self.needs_save() {
            let result = spawn_blocking(self.save_snapshot()).await;
            self.record_save(result);
        }
    }

    /// Applies events to the overlay in a single batch.
    fn apply_events(&mut self, events: impl Iterator<Item = KindEvent>) {
        let now = Timestamp::now();
        let mut edit = self.overlay.edit(monotonic());
        events.for_each(|event| self.reflector.apply(event, now, &mut edit));
    }

    /// Loads the last known state, as written by an earlier process.
    async fn use_snapshot(&mut self) {
        let (path, node) = (self.scope.snapshot.clone(), self.scope.node.clone());
        let read = spawn_blocking(move || snapshot::read(&path, &node)).await;
        let read = read.unwrap_or_else(|error| Err(io::Error::other(error).into()));
        let snapshot: Option<Snapshot> = read.unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            let path = self.scope.snapshot.display();
            warn!(%path, error, "cannot use the last known state");
            None
        });
        match &snapshot {
            Some(Snapshot { written, objects }) => {
                let objects = objects.len();
                warn!(%written, objects, "cannot reach the API server; using the last known state");
            }
            None => warn!(
                "cannot reach the API server, and there is no last known state; keeping existing map entries"
            ),
        }
        let mut edit = self.overlay.edit(monotonic());
        self.reflector.use_snapshot(snapshot, &mut edit);
    }

    /// Returns true if the state is complete and has changed since it was last written.
    fn needs_save(&self) -> bool {
        !self.reflector.is_saved && self.reflector.is_synced()
    }

    /// Returns a function that writes the current state to disk.
    fn save_snapshot(&mut self) -> impl FnOnce() -> io::Result<()> + Send + use<> {
        self.reflector.is_saved = true;
        let (path, node) = (self.scope.snapshot.clone(), self.scope.node.clone());
        let snapshot = Snapshot {
            written: Timestamp::now(),
            objects: self.overlay.objects(),
        };
        move || snapshot::write(&path, &node, &snapshot)
    }

    /// Records the result of writing the last known state. If the write failed, it is retried.
    fn record_save(&mut self, result: Result<io::Result<()>, JoinError>) {
        if let Err(error) = result.map_err(io::Error::other).flatten() {
            self.reflector.is_saved = false;
            warn!(path = %self.scope.snapshot.display(), %error, "cannot write the last known state");
        }
    }

    /// Publishes the report and the warnings, and logs what changed in the report.
    fn publish(&mut self) {
        let mut report = self.reflector.report(self.current.server(), &self.overlay);
        self.problem_log.log_changes(&mut report);
        let before = Arc::clone(&self.report.borrow());
        log_server_changes(before.server.as_ref(), report.server.as_ref());
        publish::publish_if_changed(
            &self.warnings,
            self.reflector.warnings(&self.overlay).into(),
        );
        publish::publish_if_changed(&self.report, Arc::new(report));
    }
}

/// Logs when requests to the server start failing and when they succeed again.
fn log_server_changes(before: Option<&ServerStatus>, now: Option<&ServerStatus>) {
    let (Some(before), Some(now)) = (before, now) else {
        return;
    };
    let server = &now.address;
    match (&before.error, &now.error) {
        (None, Some(error)) => warn!(server, error, "requests to the API server fail"),
        (Some(_), None) => info!(server, "requests to the API server succeed again"),
        (Some(_), Some(_)) | (None, None) => {}
    }
    if before.stale.is_some() && now.stale.is_none() {
        info!("received all objects from the API server; the last known state is no longer used");
    }
}

#[cfg(test)]
mod tests;
