//! Builds Kubernetes manifests in YAML.

use std::fmt::Display;

pub use tunnel_common::addr::Protocol;

pub use self::{node::NodeObject, service::Service};

mod node;
mod service;

/// A file to put into the manifest directory: its name and its contents.
#[derive(Clone, Debug)]
pub struct Manifest {
    pub file: String,
    pub text: String,
}

impl Manifest {
    /// Creates a file that contains all of the given Services.
    #[must_use]
    pub fn of_services(file: &str, services: &[Service]) -> Self {
        let text: String = services.iter().map(ToString::to_string).collect();
        Self::from((file, &*text))
    }

    /// Creates the ConfigMap that lists additional ports to steer, under the ConfigMap's default name. `key`
    /// is the entry that contains the list.
    #[must_use]
    pub fn further_ports(key: &str, ports: &str) -> Self {
        let text = format!(
            "apiVersion: v1\n\
             kind: ConfigMap\n\
             metadata: {{ name: yurt-tunnel-server-cfg, namespace: kube-system }}\n\
             data: {{ {key}: \"{ports}\" }}\n"
        );
        Self::from(("further-ports.yaml", &*text))
    }
}

impl From<Service> for Manifest {
    fn from(service: Service) -> Self {
        Self {
            file: service.file(),
            text: service.to_string(),
        }
    }
}

impl From<(&str, &str)> for Manifest {
    fn from((file, text): (&str, &str)) -> Self {
        Self {
            file: file.to_owned(),
            text: text.to_owned(),
        }
    }
}

fn comma_separated(items: impl Iterator<Item = impl Display>) -> String {
    items
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}
