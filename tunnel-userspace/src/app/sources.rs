//! Where the objects of a node come from.

use std::sync::Arc;

use http::Uri;
use tokio::sync::watch;

use super::node::{NodeError, failed, steering_rules};
use crate::{
    config::{Config, SourceFile, SourceKube},
    events,
    model::{ExternalIps, TopologyKeys, Update},
    reconcile::Updates,
    source::{
        Report, Store, file,
        file::FileSource,
        kube::{self, KubeSource},
    },
    tasks::Tasks,
};

/// The sources that the config names, and the store of what they say.
pub(super) struct Sources {
    store: Store,
    file: Option<FileSource>,
    kube: Option<KubeSource>,
}

impl Sources {
    /// Reads the files and begins with the API server. Where both say something of one object, the
    /// file counts.
    pub(super) async fn start(config: &Config) -> Result<Self, NodeError> {
        let mut store = Store::default();
        let file = config.source.file();
        let kube = config.source.kube.as_ref();
        let (file, kube) = (
            file.map(|wanted| (wanted, store.overlay())),
            kube.map(|wanted| (wanted, store.overlay())),
        );
        let mut sources = Self {
            store,
            file: None,
            kube: None,
        };
        if let Some((wanted, overlay)) = file {
            let source = file::start(file_settings(wanted), overlay).await;
            sources.file = Some(source.map_err(failed("cannot read the manifests"))?);
        }
        if let Some((wanted, overlay)) = kube {
            let settings = kube_settings(config, wanted)?;
            let source = kube::start(settings, overlay).await;
            sources.kube = Some(source.map_err(failed("cannot follow the API server"))?);
        }
        Ok(sources)
    }

    /// What they have read, as it stands at any time.
    pub(super) fn report(&self) -> impl Fn() -> Report + Send + Sync + use<> {
        let file = self.file.as_ref().map(FileSource::report);
        let kube = self.kube.as_ref().map(KubeSource::report);
        move || {
            let reports = file.iter().chain(&kube);
            Report::merge(reports.map(|report| Arc::clone(&report.borrow())))
        }
    }

    /// Tells the API server, where it is a source, what an operator must act on.
    pub(super) fn start_events(
        &self,
        config: &Config,
        mut views: events::Views,
        tasks: &mut Tasks,
        draining: &watch::Receiver<bool>,
    ) {
        let (Some(kube), Some(wanted)) = (&self.kube, &config.source.kube) else {
            return;
        };
        if !wanted.events.enabled {
            return;
        }
        views.concerns.push(kube.concerns());
        let settings = events::Settings {
            node: config.node_name.clone(),
            burst: wanted.events.burst,
            every: wanted.events.every,
        };
        let telling = events::run(settings, kube.client(), views, draining.clone());
        tasks.start("events", telling);
    }

    /// Lets them tell what changes; the store of that.
    pub(super) fn run(self, tasks: &mut Tasks, draining: &watch::Receiver<bool>) -> Store {
        if let Some(file) = self.file {
            tasks.start("source of files", file.run(draining.clone()));
        }
        if let Some(kube) = self.kube {
            tasks.start("source of the API server", kube.run(draining.clone()));
        }
        self.store
    }
}

impl Updates for Store {
    async fn update(&mut self) -> Option<Update> {
        Self::update(self).await
    }
}

fn file_settings(wanted: SourceFile) -> file::Settings {
    file::Settings {
        path: wanted.path,
        max_file_bytes: wanted.max_file_bytes,
    }
}

fn kube_settings(config: &Config, wanted: &SourceKube) -> Result<kube::Settings, NodeError> {
    let servers = wanted
        .api_servers
        .iter()
        .map(|server| server.parse::<Uri>());
    let steering = steering_rules(config)?.map(|rules| kube::Steering {
        labels: rules.edge.keys().map(str::to_owned).collect(),
        config_map: rules.config_map,
    });
    Ok(kube::Settings {
        kubeconfig: wanted.kubeconfig.clone(),
        api_servers: servers
            .collect::<Result<_, _>>()
            .map_err(failed("cannot use source.kube.apiServers"))?,
        connect_timeout: wanted.connect_timeout,
        watch_timeout: wanted.watch_timeout,
        longest_pause: wanted.longest_pause,
        page_size: wanted.page_size,
        patience: wanted.patience,
        kept: config.kept_objects(),
        keep_every: wanted.keep_every,
        node: config.node_name.clone(),
        steering,
        owners: match config.service.external_ips {
            ExternalIps::Any => false,
            ExternalIps::Owned => true,
        },
        pools: match config.service.topology_keys {
            TopologyKeys::Ignore => false,
            TopologyKeys::Honour => true,
        },
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
    async fn the_sources_are_those_that_the_config_names() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("kubeconfig"), KUBECONFIG).expect("written");
        let path = folder.path().display();
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
    fn it_matters_who_has_an_address_where_external_ips_must_be_owned() {
        for (text, wanted) in [
            ("source: { kube: {} }", false),
            (
                "{ source: { kube: {} }, service: { externalIPs: any } }",
                false,
            ),
            (
                "{ source: { kube: {} }, service: { externalIPs: owned } }",
                true,
            ),
        ] {
            let config = Config::parse(text).expect("good");
            let wanted_of = config.source.kube.as_ref().expect("the API server");
            let settings = kube_settings(&config, wanted_of).expect("settings");
            assert_eq!(settings.owners, wanted, "{text}");
        }
    }

    #[test]
    fn it_matters_where_nodes_are_where_topology_keys_are_honoured() {
        for (service, wanted) in [
            ("{}", false),
            ("{ topologyKeys: ignore }", false),
            ("{ topologyKeys: honour }", true),
        ] {
            let text = format!("{{ source: {{ kube: {{}} }}, service: {service} }}");
            let config = Config::parse(&text).expect("good");
            let wanted_of = config.source.kube.as_ref().expect("the API server");
            let settings = kube_settings(&config, wanted_of).expect("settings");
            assert_eq!(settings.pools, wanted, "{text}");
        }
    }
}
