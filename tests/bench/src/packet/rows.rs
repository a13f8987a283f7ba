//! The rows of the benchmark of packets, with the nodes that they need.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use serde::Serialize;
use tunnel_tests::sandbox::Sandbox;

use super::{
    CPU, Options,
    nodes::{self, BenchNode, NODE, Nodes, Place, Translator},
    streams::{self, Translation},
};

/// The requests of a row.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Path {
    /// To a backend on the node, through a node port if the variant translates.
    Here,
    /// To a backend on another node, which then sees the node's address.
    Masqueraded,
    /// To a backend on another node, past the network stack.
    Redirected,
    /// To the backend on the node directly, through a node that translates other packets.
    Foreign,
    /// From a pod of the node to the backend on the node directly.
    PodToPod,
}

impl Path {
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Here => "here",
            Self::Masqueraded => "other node",
            Self::Redirected => "other node, redirected",
            Self::Foreign => "not a Service",
            Self::PodToPod => "pod to pod",
        }
    }

    pub(super) const fn place(self) -> Place {
        match self {
            Self::Here | Self::Foreign | Self::PodToPod => Place::Here,
            Self::Masqueraded | Self::Redirected => Place::Elsewhere,
        }
    }

    /// Returns the path with which this one is compared.
    pub(super) const fn direct(self) -> Self {
        match self {
            Self::Here | Self::Foreign => Self::Here,
            Self::Masqueraded | Self::Redirected => Self::Masqueraded,
            Self::PodToPod => self,
        }
    }
}

/// A row of the table: a client, and the ports that it sends requests to.
pub(super) struct Row {
    pub(super) variant: String,
    /// The number of Services with Culvert.
    pub(super) culvert: Option<u32>,
    pub(super) path: Path,
    pub(super) client: Sandbox,
    pub(super) first: SocketAddr,
    pub(super) count: u16,
    pub(super) apart: u16,
}

/// The rows of the tables.
#[derive(Default)]
pub(super) struct Rows {
    pub(super) requests: Vec<Row>,
    pub(super) streams: Vec<streams::Row>,
}

impl Rows {
    /// Creates a node without translation, and its rows.
    pub(super) fn add_direct(
        &mut self,
        nodes: &mut Nodes,
        name: &str,
        (translator, translation): (Translator, Translation),
    ) -> Result<()> {
        let node = nodes
            .create(translator, CPU)
            .with_context(|| name.to_owned())?;
        let row = |path, client| direct_row(node, (name, None), path, client);
        self.requests.extend([
            row(Path::Here, node.client()),
            row(Path::Masqueraded, node.client()),
            row(Path::PodToPod, node.client_pod()?),
        ]);
        self.streams
            .extend(streams::rows(node, name, (translation, 0)));
        Ok(())
    }

    pub(super) fn add_culvert(
        &mut self,
        nodes: &mut Nodes,
        count: u32,
        options: &Options,
    ) -> Result<()> {
        let translator = Translator::Culvert(count, options.common.settings()?);
        self.add_node_ports(nodes, count, (translator, Translation::Stack))?;
        let node = nodes.last()?;
        let variant = (node.name(), Some(count));
        let row = direct_row(node, variant, Path::Foreign, node.client());
        self.requests.push(row);
        Ok(())
    }

    /// Creates a node that sends packets past the network stack, and its rows.
    pub(super) fn add_redirect(
        &mut self,
        nodes: &mut Nodes,
        count: u32,
        options: &Options,
    ) -> Result<()> {
        let mut settings = options.common.settings()?;
        "packets: { delivery: redirect }".clone_into(&mut settings.node_ports);
        let node = nodes.create(Translator::Culvert(count, settings), CPU)?;
        self.requests
            .push(node_port_row(node, count, Path::Redirected, true));
        let name = format!("{}, redirected", node.name());
        let rows = streams::rows(node, &name, (Translation::Redirect, count));
        self.streams.extend(rows);
        Ok(())
    }

    /// Creates a node that also translates packets on the links of pods, and its row.
    pub(super) fn add_all_links(
        &mut self,
        nodes: &mut Nodes,
        count: u32,
        options: &Options,
    ) -> Result<()> {
        let mut settings = options.common.settings()?;
        "packets: { links: all }".clone_into(&mut settings.node_ports);
        let node = nodes.create(Translator::Culvert(count, settings), CPU)?;
        let name = format!("{} with all links", node.name());
        let variant = (&*name, Some(count));
        let row = direct_row(node, variant, Path::PodToPod, node.client_pod()?);
        self.requests.push(row);
        Ok(())
    }

    /// Creates a node that translates node ports, and its rows.
    pub(super) fn add_node_ports(
        &mut self,
        nodes: &mut Nodes,
        count: u32,
        (translator, translation): (Translator, Translation),
    ) -> Result<()> {
        let node = nodes
            .create(translator, CPU)
            .with_context(|| format!("with {count} Services"))?;
        let is_culvert = translation == Translation::Stack;
        for path in [Path::Here, Path::Masqueraded] {
            self.requests
                .push(node_port_row(node, count, path, is_culvert));
        }
        let rows = streams::rows(node, node.name(), (translation, count));
        self.streams.extend(rows);
        Ok(())
    }
}

/// Creates a row of requests to a backend directly. The variant has the number of Services with Culvert.
fn direct_row(
    node: &BenchNode,
    (variant, culvert): (&str, Option<u32>),
    path: Path,
    client: Sandbox,
) -> Row {
    Row {
        variant: variant.to_owned(),
        culvert,
        path,
        client,
        first: node.backend(path.place()),
        count: nodes::USED,
        apart: 1,
    }
}

/// Creates a row of a node that translates node ports.
fn node_port_row(node: &BenchNode, count: u32, path: Path, is_culvert: bool) -> Row {
    let ports = nodes::ports(count, path.place());
    Row {
        variant: node.name().to_owned(),
        culvert: is_culvert.then_some(count),
        path,
        client: node.client(),
        first: SocketAddr::new(IpAddr::V4(NODE), ports.first),
        count: ports.count,
        apart: ports.apart,
    }
}
