use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use super::duration;

/// Where objects come from. Where both say something of one object, the file counts.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Source {
    /// A folder or file of manifests; on by itself where there is no other source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<SourceFile>,
    /// The API server of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kube: Option<SourceKube>,
}

impl Source {
    /// The folder or file of manifests, if it is a source.
    #[must_use]
    pub fn file(&self) -> Option<SourceFile> {
        match (&self.file, &self.kube) {
            (None, None) => Some(SourceFile::default()),
            (file, _) => file.clone(),
        }
    }

    pub(super) fn check(&self) -> Result<(), (String, String)> {
        if self
            .file()
            .is_some_and(|file| file.path.as_os_str().is_empty())
        {
            let reason = "must name a folder or file of manifests";
            return Err(("source.file.path".to_owned(), reason.to_owned()));
        }
        self.kube.as_ref().map_or(Ok(()), SourceKube::check)
    }

    pub(super) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let file = self.file.as_mut().map(|file| &mut file.path);
        let kubeconfig = self.kube.as_mut().and_then(|kube| kube.kubeconfig.as_mut());
        file.into_iter().chain(kubeconfig)
    }
}

/// The API server of the cluster.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct SourceKube {
    /// A kubeconfig. Relative to the config file. Without one the pod's service account is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// The servers, in place of the one that the kubeconfig or the pod's environment names: that one
    /// is a Service, which this daemon is to translate.
    pub api_servers: Vec<String>,
    /// How long a connect may take.
    #[serde(with = "duration")]
    pub connect_timeout: Duration,
    /// How long one watch lasts, at most 290 s.
    #[serde(with = "duration")]
    pub watch_timeout: Duration,
    /// The longest pause between two tries to reach the server.
    #[serde(with = "duration")]
    pub longest_pause: Duration,
    /// Objects in a page, where the server doesn't stream lists.
    pub page_size: u32,
    /// How long to wait for the server at a start, until the last known state is used.
    #[serde(with = "duration")]
    pub patience: Duration,
    /// How often the last known state is written, at most.
    #[serde(with = "duration")]
    pub keep_every: Duration,
    /// What an operator must act on, told as Events on Services and Nodes.
    pub events: Events,
}

/// Events on Services and Nodes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Events {
    /// Whether any are made.
    pub enabled: bool,
    /// How many this node may make at once, from 1 to 1000.
    pub burst: u32,
    /// How long until another one may be made, once that many were.
    #[serde(with = "duration")]
    pub every: Duration,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            enabled: true,
            burst: 10,
            every: Duration::from_secs(30),
        }
    }
}

impl Default for SourceKube {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            api_servers: Vec::new(),
            connect_timeout: Duration::from_secs(5),
            watch_timeout: Duration::from_secs(290),
            longest_pause: Duration::from_secs(10),
            page_size: 500,
            patience: Duration::from_secs(3),
            keep_every: Duration::from_secs(10),
            events: Events::default(),
        }
    }
}

impl SourceKube {
    fn check(&self) -> Result<(), (String, String)> {
        for (index, server) in self.api_servers.iter().enumerate() {
            let url = server.parse::<http::Uri>().ok().filter(|url| {
                let is_https = url.scheme_str() == Some("https");
                is_https && url.host().is_some() && matches!(url.path(), "" | "/")
            });
            if url.is_none() {
                let field = format!("source.kube.apiServers[{index}]");
                return Err((field, format!("`{server}` is no https://HOST:PORT")));
            }
        }
        let bounds = [
            ("connectTimeout", self.connect_timeout, 1, 60),
            ("watchTimeout", self.watch_timeout, 10, 290),
            ("longestPause", self.longest_pause, 1, 300),
            ("keepEvery", self.keep_every, 1, 86_400),
            ("patience", self.patience, 0, 3600),
            ("events.every", self.events.every, 1, 3600),
        ];
        for (field, value, least, most) in bounds {
            let range = Duration::from_secs(least)..=Duration::from_secs(most);
            if !range.contains(&value) {
                let field = format!("source.kube.{field}");
                return Err((field, format!("must be from {least}s to {most}s")));
            }
        }
        if !(1..=1000).contains(&self.events.burst) {
            let reason = format!("must be from 1 to 1000, is {}", self.events.burst);
            return Err(("source.kube.events.burst".to_owned(), reason));
        }
        if !(10..=10_000).contains(&self.page_size) {
            let reason = format!("must be from 10 to 10000, is {}", self.page_size);
            return Err(("source.kube.pageSize".to_owned(), reason));
        }
        Ok(())
    }
}

/// A folder or file of manifests.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct SourceFile {
    /// The folder or file. Relative to the config file.
    pub path: PathBuf,
    /// The size up to which a file is read, in bytes.
    pub max_file_bytes: u64,
}

impl Default for SourceFile {
    fn default() -> Self {
        Self {
            path: "/etc/culvert/manifests".into(),
            max_file_bytes: 64 << 20,
        }
    }
}
