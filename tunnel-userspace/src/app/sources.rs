//! Starts the configured sources of Kubernetes objects: manifest files and the API server.

use std::sync::Arc;

use tokio::sync::watch;

use super::{RoleError, failed, node::steering_rules};
use crate::{
    admin::Getter,
    config::Config,
    events,
    model::{ClusterUpdate, ExternalIps, NodeList, TopologyKeys},
    reconcile::Updates,
    source::{
        SourceReport, Store, file,
        file::FileSource,
        kube::{self, KubeSource},
    },
    tasks::Tasks,
};

/// The configured sources, and the store that they write to.
pub(super) struct Sources {
    store: Store,
    file: Option<FileSource>,
    kube: Option<KubeSource>,
}

impl Sources {
    /// Reads the manifest files and connects to the API server. If both have the same object, the one from
    /// the file takes precedence.
    pub(super) async fn start(config: &Config) -> Result<Self, RoleError> {
        let (mut store, mut file, mut kube) = (Store::default(), None, None);
        if let Some(wanted) = config.source.file() {
            let source = file::start(wanted, store.overlay()).await;
            file = Some(source.map_err(failed("cannot read the manifests"))?);
        }
        if let Some(wanted) = &config.source.kube {
            let source = kube::start(wanted.clone(), scope(config)?, store.overlay()).await;
            kube = Some(source.map_err(failed("cannot watch the API server"))?);
        }
        Ok(Self { store, file, kube })
    }

    /// Returns a getter that merges the sources' current reports.
    pub(super) fn report(&self) -> Getter<SourceReport> {
        let file = self.file.as_ref().map(FileSource::report);
        let kube = self.kube.as_ref().map(KubeSource::report);
        Box::new(move || {
            let reports = file.iter().chain(&kube);
            SourceReport::merge(reports.map(|report| Arc::clone(&report.borrow())))
        })
    }

    /// Returns a receiver for the names of the Nodes in the sources.
    pub(super) fn nodes(&self) -> watch::Receiver<NodeList> {
        self.store.nodes()
    }

    /// Starts the task that creates Events, if the API server is a source and Events are enabled.
    pub(super) fn start_events(
        &self,
        config: &Config,
        mut views: events::EventInputs,
        tasks: &mut Tasks,
    ) {
        let (Some(kube), Some(wanted)) = (&self.kube, &config.source.kube) else {
            return;
        };
        if !wanted.events.enabled {
            return;
        }
        views.warnings.push(kube.warnings());
        let node = config.node_name.clone();
        let events = events::run(node, wanted.events, kube.client(), views, tasks.draining());
        tasks.start("events", events);
    }

    /// Starts the tasks that watch the sources, and returns the store.
    pub(super) fn run(self, tasks: &mut Tasks) -> Store {
        if let Some(file) = self.file {
            tasks.start("file source", file.run(tasks.draining()));
        }
        if let Some(kube) = self.kube {
            tasks.start("API server source", kube.run(tasks.draining()));
        }
        self.store
    }
}

impl Updates for Store {
    async fn update(&mut self) -> Option<ClusterUpdate> {
        Self::update(self).await
    }
}

/// Determines which of the API server's objects a node with this config has to watch.
fn scope(config: &Config) -> Result<kube::KubeScope, RoleError> {
    let steering = steering_rules(config)?.map(|rules| kube::SteeringScope {
        labels: rules.edge_selector.keys().map(str::to_owned).collect(),
        config_map: rules.config_map,
        pods: config.tunnel.allows_namespaces(),
    });
    Ok(kube::KubeScope {
        node: config.node_name.clone(),
        steering,
        owned_external_ips: config.service.external_ips == ExternalIps::Owned,
        packets: config.service.packets.enabled,
        node_pools: config.service.topology_keys == TopologyKeys::Honor,
        snapshot: config.objects_snapshot(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBECONFIG: &str = "apiVersion: v1\n\
        kind: Config\n\
        current-context: test\n\
        clusters: [{name: test, cluster: {server: 'http://127.0.0.1:1'}}]\n\
        contexts: [{name: test, context: {cluster: test, user: test}}]\n\
        users: [{name: test, user: {}}]\n";

    #[tokio::test]
    async fn only_configured_sources_are_started() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("kubeconfig"), KUBECONFIG).expect("written");
        let path = directory.path().display();
        let file = format!("file: {{ path: {path} }}");
        let kube = format!("kube: {{ kubeconfig: {path}/kubeconfig }}");
        for (text, wanted) in [
            (format!("source: {{ {file} }}"), [true, false]),
            (format!("source: {{ {kube} }}"), [false, true]),
            (format!("source: {{ {file}, {kube} }}"), [true, true]),
        ] {
            let config = Config::parse(&text).expect("good");
            let sources = Sources::start(&config).await.expect("sources");
            assert_eq!([sources.file.is_some(), sources.kube.is_some()], wanted);
        }
    }

    #[test]
    fn nodes_are_watched_for_external_ip_owners_or_topology_keys_only_if_enabled() {
        for (service, wanted) in [
            ("{}", [false, false]),
            ("{ externalIPs: any, topologyKeys: ignore }", [false, false]),
            ("{ externalIPs: owned }", [true, false]),
            ("{ topologyKeys: honor }", [false, true]),
        ] {
            let text = format!("{{ source: {{ kube: {{}} }}, service: {service} }}");
            let config = Config::parse(&text).expect("good");
            let scope = scope(&config).expect("a scope");
            assert_eq!(
                [scope.owned_external_ips, scope.node_pools],
                wanted,
                "{text}"
            );
        }
    }
}
