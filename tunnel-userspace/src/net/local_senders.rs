//! The senders of packets that count as local.

use tunnel_common::{locality, service::SourceRange, steering::Prefix};

use super::uplinks::PodRanges;

/// The senders behind a link that count as local.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LocalOnLink {
    /// Those whose address is in a range of local senders.
    #[default]
    InRanges,
    /// The same, and all senders of a family without such a range.
    PresumedLocal,
    /// All of them.
    All,
}

/// The senders that count as local (`service.detectLocal`).
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LocalSenders {
    /// Senders on uplinks are not distinguished.
    Unknown,
    /// Senders behind the link with this name. None of them reaches an uplink.
    OnBridge(String),
    /// Senders behind links whose names begin with this prefix. None of them reaches an uplink.
    OnInterfaces(String),
    /// Senders in the configured ranges (`service.clusterCIDRs`).
    ClusterRanges,
    /// Senders in the pod ranges of this node's Node object.
    NodeRanges,
}

impl LocalSenders {
    /// Returns the ranges of the local senders.
    pub(super) fn ranges(&self, pod_ranges: &PodRanges) -> Vec<SourceRange> {
        match self {
            Self::Unknown => Vec::new(),
            Self::OnBridge(_) | Self::OnInterfaces(_) => {
                [true, false].map(locality::nobody).to_vec()
            }
            Self::ClusterRanges => ranges_of(&pod_ranges.configured),
            Self::NodeRanges => ranges_of(&pod_ranges.of_node),
        }
    }

    /// Returns the local senders behind a link. `is_proven` is true if the link is known to lead to pods of this node.
    pub(super) fn behind(&self, link: &str, is_proven: bool) -> LocalOnLink {
        let is_named = match self {
            Self::OnBridge(name) => link == name,
            Self::OnInterfaces(prefix) => link.starts_with(prefix),
            Self::Unknown | Self::ClusterRanges | Self::NodeRanges => false,
        };
        if is_named {
            LocalOnLink::All
        } else if is_proven {
            LocalOnLink::PresumedLocal
        } else {
            LocalOnLink::InRanges
        }
    }
}

pub(super) fn ranges_of(prefixes: &[Prefix]) -> Vec<SourceRange> {
    prefixes.iter().map(SourceRange::of_prefix).collect()
}
