//! Plain Kubernetes manifests, as YAML.

use std::fmt::{self, Display};

pub use self::service::Service;
use crate::topology::{HOST_V4, HOST_V6};

pub mod objects;
mod service;

/// A file for the folder of manifests.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// Its name.
    pub file: String,
    /// Its content.
    pub text: String,
}

impl Manifest {
    /// The Node object of the laboratory's node.
    #[must_use]
    pub fn node(name: &str) -> Self {
        let text = format!(
            "apiVersion: v1\n\
             kind: Node\n\
             metadata: {{ name: {name} }}\n\
             status:\n\
             \x20 addresses:\n\
             \x20 - {{ type: InternalIP, address: \"{HOST_V4}\" }}\n\
             \x20 - {{ type: InternalIP, address: \"{HOST_V6}\" }}\n"
        );
        Self {
            file: "node.yaml".to_owned(),
            text,
        }
    }

    /// One file that holds many Services.
    #[must_use]
    pub fn of_services(file: &str, services: &[Service]) -> Self {
        let mut text = String::new();
        for service in services {
            text.push_str(&service.to_string());
        }
        Self {
            file: file.to_owned(),
            text,
        }
    }
}

impl From<&Service> for Manifest {
    fn from(service: &Service) -> Self {
        Self {
            file: service.file(),
            text: service.to_string(),
        }
    }
}

impl From<Service> for Manifest {
    fn from(service: Service) -> Self {
        Self::from(&service)
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

/// A transport protocol of a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        })
    }
}

fn listed(items: impl Iterator<Item = impl Display>) -> String {
    items
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}
