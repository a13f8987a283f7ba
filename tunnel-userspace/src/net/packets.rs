//! Keeps the programs that translate packets attached to the uplinks, as the node's network changes.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::sleep_until};
use tracing::{info, warn};
use tunnel_common::{locality, service::SourceRange, steering::Prefix};

use super::{
    CheckSchedule, NetworkState, filters, link_header::LinkHeader, netlink::RouteSocket,
    uplinks::PodRanges,
};
use crate::{drain, error_chain::chain};

/// This node's addresses that stand for clients on a link.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AddressPair {
    /// The IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// The IPv6 address.
    pub v6: Option<Ipv6Addr>,
}

impl AddressPair {
    /// Sets the address of the IP address's family, unless there is one.
    pub(super) const fn add(&mut self, ip: IpAddr) {
        match ip {
            IpAddr::V4(v4) if self.v4.is_none() => self.v4 = Some(v4),
            IpAddr::V6(v6) if self.v6.is_none() => self.v6 = Some(v6),
            IpAddr::V4(_) | IpAddr::V6(_) => {}
        }
    }
}

/// The senders that count as local, as packets on uplinks show them (`service.detectLocal`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LocalSenders {
    /// Senders are not distinguished.
    Unknown,
    /// No sender that reaches an uplink is local, since local ones are behind other links.
    Nobody,
    /// Senders in the configured ranges (`service.clusterCIDRs`).
    ClusterRanges,
    /// Senders in the pod ranges of this node's Node object.
    NodeRanges,
}

impl LocalSenders {
    /// Returns the ranges of the local senders.
    fn ranges(self, pod_ranges: &PodRanges) -> Vec<SourceRange> {
        let of = |prefixes: &[Prefix]| prefixes.iter().map(SourceRange::of_prefix).collect();
        match self {
            Self::Unknown => Vec::new(),
            Self::Nobody => [true, false].map(locality::nobody).to_vec(),
            Self::ClusterRanges => of(&pod_ranges.configured),
            Self::NodeRanges => of(&pod_ranges.of_node),
        }
    }
}

/// The uplinks whose packets are translated, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PacketsView {
    /// True if packets are translated (`service.packets.enabled`).
    pub enabled: bool,
    /// The names of the uplinks.
    pub uplinks: Vec<String>,
    /// Descriptions of the programs of others on the uplinks.
    pub others: Vec<String>,
    /// The uplinks whose packets are not translated, and the settings of the kernel that keep packets from backends.
    pub warnings: Vec<String>,
    /// The current problem, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Returns a warning for each uplink and family for which the kernel forwards no packets.
fn forwarding_warnings(uplinks: &BTreeMap<u32, String>) -> Vec<String> {
    let off = uplinks.values().flat_map(|uplink| {
        ["ipv4", "ipv6"].into_iter().filter_map(move |family| {
            let path = format!("/proc/sys/net/{family}/conf/{uplink}/forwarding");
            let value = fs::read_to_string(path).ok()?;
            (value.trim() == "0").then(|| {
                format!(
                    "net.{family}.conf.{uplink}.forwarding is 0, so packets reach only backends in the host's network"
                )
            })
        })
    });
    off.collect()
}

/// The settings of [`PacketLinks`].
#[derive(Clone, Copy, Debug)]
pub struct PacketLinkSettings {
    /// The interval between checks that the programs are attached.
    pub check_interval: Duration,
    /// The senders that count as local.
    pub local_senders: LocalSenders,
    /// True if the address in the Node object stands for clients on every link, and not the link's own address.
    pub uses_node_address: bool,
}

/// The programs that translate packets on uplinks.
pub trait UplinkTranslation: Send {
    /// The type of the errors that the operations return.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Attaches the programs to every uplink, given by index and name: those whose packets have an Ethernet header, and those
    /// whose packets have none. If `reattach` is true, repairs those that are already attached.
    ///
    /// # Errors
    ///
    /// Returns an error if a program can't be attached to a link.
    fn attach(
        &mut self,
        uplinks: &BTreeMap<u32, String>,
        without_ethernet: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), Self::Error>;

    /// Detaches the programs from all links that are not uplinks.
    ///
    /// # Errors
    ///
    /// Returns an error if a program can't be detached.
    fn remove_unused(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), Self::Error>;

    /// Describes the programs of others on uplinks.
    fn others(&self, uplinks: &BTreeMap<u32, String>) -> Vec<String>;

    /// Stores the ranges of local senders.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be written, or has too few entries.
    fn set_local_ranges(&mut self, ranges: &[SourceRange]) -> Result<(), Self::Error>;

    /// Stores the addresses that stand for clients on each link, and removes those of other links.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be written.
    fn set_addresses(&mut self, addresses: &BTreeMap<u32, AddressPair>) -> Result<(), Self::Error>;
}

/// The task that keeps the programs attached.
pub struct PacketLinks<K> {
    programs: K,
    network: watch::Receiver<NetworkState>,
    settings: PacketLinkSettings,
    view: watch::Sender<PacketsView>,
    /// Descriptions of the filters of others on the uplinks, as of the last time that they were listed.
    filters: Vec<String>,
}

impl<K: UplinkTranslation> PacketLinks<K> {
    /// Creates the task. `network` must include routes. Nothing is attached yet.
    #[must_use]
    pub const fn new(
        programs: K,
        network: watch::Receiver<NetworkState>,
        settings: PacketLinkSettings,
        view: watch::Sender<PacketsView>,
    ) -> Self {
        Self {
            programs,
            network,
            settings,
            view,
            filters: Vec::new(),
        }
    }

    /// Attaches the programs to new uplinks, and detaches them from links that are none any more. If `reattach` is true,
    /// also repairs those that are attached. Returns false if there is a problem, which is logged.
    pub fn check(&mut self, reattach: bool) -> bool {
        let network = self.network.borrow_and_update().clone();
        let mut uplinks = network.links.uplinks.clone();
        // The packets of a port of a bridge or bond belong to the bridge or bond.
        uplinks.retain(|index, _| !network.snapshot.has_master(*index));
        let with_header = |uplinks: &mut BTreeMap<u32, String>, header: LinkHeader| {
            let has_header =
                |index: &u32, _: &mut String| network.snapshot.link_header(*index) == header;
            uplinks
                .extract_if(.., has_header)
                .collect::<BTreeMap<_, _>>()
        };
        let unreadable = with_header(&mut uplinks, LinkHeader::Other);
        let warnings = unreadable.values().map(|uplink| {
            format!("uplink {uplink} has neither Ethernet nor bare IP packets, so packets that arrive on it are not translated")
        });
        let mut with_ethernet = uplinks.clone();
        let without_ethernet = with_header(&mut with_ethernet, LinkHeader::Absent);
        let preferred: &[IpAddr] = if self.settings.uses_node_address {
            &network.internal_ips
        } else {
            &[]
        };
        let links = uplinks.keys().copied();
        let addresses = network.snapshot.client_addresses(links, preferred);
        let local_ranges = self.settings.local_senders.ranges(&network.pod_ranges);
        let mut problems = Vec::from_iter(network.problem);
        let is_complete = problems.is_empty() && network.links.missing.is_none();
        // The addresses must be there before the first packet is translated.
        let mut results = vec![
            self.programs.set_local_ranges(&local_ranges),
            self.programs.set_addresses(&addresses),
            self.programs
                .attach(&with_ethernet, &without_ethernet, reattach),
        ];
        if is_complete {
            results.push(self.programs.remove_unused(&uplinks));
        }
        problems.extend(
            results
                .into_iter()
                .filter_map(Result::err)
                .map(|it| chain(&it)),
        );
        let is_well = problems.is_empty();
        let view = PacketsView {
            enabled: true,
            uplinks: uplinks.values().cloned().collect(),
            others: [self.programs.others(&uplinks), self.filters.clone()].concat(),
            warnings: warnings.chain(forwarding_warnings(&uplinks)).collect(),
            problem: (!is_well).then(|| problems.join("; ")),
        };
        self.view.send_if_modified(|old| {
            if *old == view {
                return false;
            }
            match &view.problem {
                Some(problem) => warn!(%problem, "cannot translate packets on all uplinks"),
                None => {
                    info!(uplinks = ?view.uplinks, "packets that arrive on uplinks are translated");
                }
            }
            *old = view;
            true
        });
        is_well
    }

    /// Lists the filters of others on the uplinks.
    async fn list_filters(&mut self, kernel: &RouteSocket) {
        let uplinks = self.network.borrow().links.uplinks.clone();
        self.filters = filters::others(kernel, &uplinks).await;
    }

    /// Runs until the drain begins. The programs stay attached.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut schedule = CheckSchedule::new(self.settings.check_interval);
        let kernel = RouteSocket::open();
        if let Err(error) = &kernel {
            warn!(error = chain(error), "the filters of others are not shown");
        }
        schedule.check_now();
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                // The follower stops only when the drain begins.
                Ok(()) = self.network.changed() => schedule.check_now(),
                () = sleep_until(schedule.next) => {
                    if let Ok(kernel) = &kernel {
                        self.list_filters(kernel).await;
                    }
                    let is_well = self.check(schedule.begin());
                    schedule.end(is_well);
                }
            }
        }
    }
}
