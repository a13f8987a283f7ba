//! Keeps the programs that translate packets attached to the uplinks, and to the links of pods if the config says so, as the
//! node's network changes.

mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use tokio::{sync::watch, time::sleep_until};
use tracing::{info, warn};
use tunnel_common::{
    packet_link::PacketLink, service::SourceRange, steering::Prefix, table::MAX_PACKET_LINKS,
};

pub use self::view::PacketsView;
use super::{
    CheckSchedule, NetworkState, filters, kernel_settings,
    link_header::LinkHeader,
    local_senders::{LocalOnLink, LocalSenders, ranges_of},
    netlink::RouteSocket,
    uplinks::matches_link,
};
use crate::{drain, error_chain::chain, model::FlowNeeds};

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

/// A link on which packets are translated.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TranslatedLink {
    /// This node's addresses that stand for clients on the link.
    pub addresses: AddressPair,
    /// True if the link leads to pods of this node.
    pub leads_to_pods: bool,
    /// The senders of packets that arrive on the link and count as local.
    pub local_senders: LocalOnLink,
    /// True if no flow may begin on the link.
    pub known_flows_only: bool,
    /// True if packets that arrive on the link are sent on past the network stack.
    pub redirects: bool,
    /// True if packets on the link have no Ethernet header.
    pub has_no_ethernet: bool,
}

/// The addresses of senders, as the programs need them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SenderRanges {
    /// Local senders.
    pub local: Vec<SourceRange>,
    /// Senders whose connections to edge nodes are forwarded to the ingress.
    pub forwarded: Vec<SourceRange>,
}

/// The description of this host itself for the programs. Its own packets begin flows.
const HOST: TranslatedLink = TranslatedLink {
    addresses: AddressPair { v4: None, v6: None },
    leads_to_pods: false,
    local_senders: LocalOnLink::All,
    known_flows_only: false,
    redirects: false,
    has_no_ethernet: false,
};

/// The warning if packets are translated on no uplink.
const NO_UPLINKS: &str = "this node has no uplink on which packets can be translated, so clients outside the node reach no Service";

/// Returns the uplinks whose packets are translated.
fn uplinks(network: &NetworkState) -> BTreeMap<u32, String> {
    let mut uplinks = network.links.uplinks.clone();
    // The packets of a port of a bridge or bond belong to the bridge or bond.
    uplinks.retain(|index, _| !network.snapshot.has_master(*index));
    uplinks
}

/// Removes the links for which the map of links has no room, and returns a description of the problem if there are any.
fn leave_out(uplinks: usize, pod_links: &mut BTreeMap<u32, String>) -> Option<String> {
    let room = usize::try_from(MAX_PACKET_LINKS)
        .unwrap_or(usize::MAX)
        .saturating_sub(uplinks + 1);
    let (first, name) = pod_links.iter().nth(room)?;
    let problem = format!(
        "packets on {} links of pods, from {name} on, are not translated: there is room for {MAX_PACKET_LINKS} links",
        pod_links.len() - room
    );
    let first = *first;
    pod_links.retain(|index, _| *index < first);
    Some(problem)
}

/// The settings of [`PacketLinks`].
#[derive(Clone, Debug)]
pub struct PacketLinkSettings {
    /// The interval between checks that the programs are attached.
    pub check_interval: Duration,
    /// The senders that count as local.
    pub local_senders: LocalSenders,
    /// True if the address in the Node object stands for clients on every link, and not the link's own address.
    pub uses_node_address: bool,
    /// True if packets are also translated on the links that lead to pods.
    pub includes_pod_links: bool,
    /// The uplinks on which arriving packets are sent on past the network stack: names, or their beginnings with `*`.
    pub redirecting: Vec<String>,
    /// The senders whose connections to edge nodes are forwarded to the ingress.
    pub forwarded: Vec<Prefix>,
}

/// The programs that translate packets.
pub trait PacketPrograms: Send {
    /// The type of the errors that the operations return.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Attaches the programs to links, given by index and name: those whose packets have an Ethernet header, and those whose
    /// packets have none. If `reattach` is true, repairs those that are already attached.
    ///
    /// # Errors
    ///
    /// Returns an error if a program can't be attached to a link.
    fn attach(
        &mut self,
        with_ethernet: &BTreeMap<u32, String>,
        without_ethernet: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), Self::Error>;

    /// Loads the programs for links whose packets have no Ethernet header, which [`Self::attach`] would load.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel rejects a program.
    fn load_without_ethernet(&mut self) -> Result<(), Self::Error>;

    /// Returns the indices of the links to which this or an earlier process has attached a program.
    fn attached_links(&self) -> BTreeSet<u32>;

    /// Returns the indices of the links that have all programs: after [`Self::attach`] those to which it has attached them, and
    /// before it those to which an earlier process has.
    fn complete_links(&self) -> BTreeSet<u32>;

    /// Detaches the programs from all other links.
    ///
    /// # Errors
    ///
    /// Returns an error if a program can't be detached.
    fn remove_unused(&mut self, links: &BTreeMap<u32, String>) -> Result<(), Self::Error>;

    /// Describes the programs of others on links.
    fn others(&self, links: &BTreeMap<u32, String>) -> Vec<String>;

    /// Stores the ranges of senders.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be written, or has too few entries.
    fn set_ranges(&mut self, ranges: &SenderRanges) -> Result<(), Self::Error>;

    /// Stores what the programs must know about links.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be written.
    fn set_links(&mut self, links: &BTreeMap<u32, TranslatedLink>) -> Result<(), Self::Error>;

    /// Removes what the programs know about all links but these. The others no longer have the programs.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read or written.
    fn forget_other_links(&mut self, links: &BTreeSet<u32>) -> Result<(), Self::Error>;
}

/// The task that keeps the programs attached.
pub struct PacketLinks<K> {
    programs: K,
    network: watch::Receiver<NetworkState>,
    /// The needs of the flows. The config may not include links that lead to pods which they need.
    needs: watch::Receiver<FlowNeeds>,
    settings: PacketLinkSettings,
    view: watch::Sender<PacketsView>,
    /// Descriptions of the filters of others on these links, as of the last time that they were listed.
    filters: Vec<String>,
}

impl<K: PacketPrograms> PacketLinks<K> {
    /// Creates the task. `network` must include routes. Nothing is attached yet.
    #[must_use]
    pub fn new(
        programs: K,
        (network, needs): (watch::Receiver<NetworkState>, watch::Receiver<FlowNeeds>),
        settings: PacketLinkSettings,
        view: watch::Sender<PacketsView>,
    ) -> Self {
        Self {
            programs,
            network,
            needs,
            settings,
            view,
            filters: Vec::new(),
        }
    }

    /// Returns the links that lead to pods and have the programs. If the config doesn't include them, those are left that
    /// flows may still need.
    fn pod_links(&mut self, network: &NetworkState) -> BTreeMap<u32, String> {
        let mut links = network.links.pod_links.clone();
        if !self.settings.includes_pod_links {
            if !self.needs.borrow_and_update().pod_links {
                return BTreeMap::new();
            }
            let attached = self.programs.attached_links();
            links.retain(|index, _| attached.contains(index));
        }
        links
    }

    /// Returns what the programs must know about the links, and about this host.
    fn describe(
        &self,
        network: &NetworkState,
        (uplinks, pod_links): (&BTreeMap<u32, String>, &BTreeMap<u32, String>),
        redirecting: &BTreeMap<u32, String>,
    ) -> BTreeMap<u32, TranslatedLink> {
        let preferred: &[IpAddr] = if self.settings.uses_node_address {
            &network.internal_ips
        } else {
            &[]
        };
        let (senders, proven) = (
            &self.settings.local_senders,
            &network.links.proven_pod_links,
        );
        let links = uplinks.keys().chain(pod_links.keys()).copied();
        let addresses = network.snapshot.client_addresses(links, preferred);
        let describe = |(index, addresses): (u32, AddressPair)| {
            let pod_link = pod_links.get(&index);
            let link = TranslatedLink {
                addresses,
                leads_to_pods: pod_link.is_some(),
                local_senders: pod_link.map_or(LocalOnLink::InRanges, |name| {
                    senders.behind(name, proven.contains(&index))
                }),
                known_flows_only: pod_link.is_some() && !self.settings.includes_pod_links,
                redirects: redirecting.contains_key(&index),
                has_no_ethernet: network.snapshot.link_header(index) != LinkHeader::Ethernet,
            };
            (index, link)
        };
        let links = addresses.into_iter().map(describe);
        links.chain([(PacketLink::HOST, HOST)]).collect()
    }

    /// Returns the uplinks from which packets are sent on past the network stack.
    fn redirecting(
        &self,
        network: &NetworkState,
        uplinks: &BTreeMap<u32, String>,
    ) -> BTreeMap<u32, String> {
        let is_redirecting = |(index, name): &(&u32, &String)| {
            let mut entries = self.settings.redirecting.iter();
            entries.any(|entry| matches_link(entry, name))
                && network.snapshot.link_header(**index) == LinkHeader::Ethernet
        };
        let uplinks = uplinks.iter().filter(is_redirecting);
        uplinks
            .map(|(index, name)| (*index, name.clone()))
            .collect()
    }

    /// Stores what the programs must know about the links, as long as each has the programs that it has now: no flow may begin
    /// on a link that has only one of them.
    fn store_links(
        &mut self,
        mut described: BTreeMap<u32, TranslatedLink>,
    ) -> Result<(), K::Error> {
        let complete = self.programs.complete_links();
        for (index, link) in &mut described {
            link.known_flows_only |= *index != PacketLink::HOST && !complete.contains(index);
        }
        self.programs.set_links(&described)
    }

    /// Detaches the programs from all other links, and removes what they know about these. While a link that `service.uplinks`
    /// names is missing, any link may be that one, under another name, so only links that no longer exist lose their programs.
    fn remove_unused(
        &mut self,
        network: &NetworkState,
        links: &BTreeMap<u32, String>,
    ) -> Result<(), K::Error> {
        let mut kept = links.clone();
        if network.links.missing.is_some() {
            let existing = network.snapshot.links.iter();
            kept.extend(existing.map(|link| (link.index, link.name.clone())));
        }
        let removed = self.programs.remove_unused(&kept);
        // No flow may begin on a link whose programs can't be detached.
        let known = kept.into_keys().chain([PacketLink::HOST]);
        let forgotten = self.programs.forget_other_links(&known.collect());
        removed.and(forgotten)
    }

    /// Loads what the first check would load.
    pub fn prepare(&mut self) {
        let network = self.network.borrow().clone();
        let (uplinks, pod_links) = (uplinks(&network), self.pod_links(&network));
        if uplinks
            .keys()
            .chain(pod_links.keys())
            .any(|index| network.snapshot.link_header(*index) == LinkHeader::Absent)
        {
            // The check reports the error, since it loads the programs again.
            drop(self.programs.load_without_ethernet());
        }
    }

    /// Attaches the programs to new links, and detaches them from those that need none any more. If `reattach` is true,
    /// also repairs those that are attached. Returns false if there is a problem, which is logged.
    pub fn check(&mut self, reattach: bool) -> bool {
        let network = self.network.borrow_and_update().clone();
        let mut problems = Vec::from_iter(network.problem.clone());
        let mut uplinks = uplinks(&network);
        let mut pod_links = self.pod_links(&network);
        problems.extend(leave_out(uplinks.len(), &mut pod_links));
        let header_of = |index: &u32| network.snapshot.link_header(*index);
        let mut unreadable = BTreeMap::new();
        for links in [&mut uplinks, &mut pod_links] {
            unreadable.extend(links.extract_if(.., |it, _| header_of(it) == LinkHeader::Other));
        }
        let warnings = unreadable.values().map(|link| {
            format!("{link} has neither Ethernet nor bare IP packets, so packets that arrive on it are not translated")
        });
        let redirecting = self.redirecting(&network, &uplinks);
        let described = self.describe(&network, (&uplinks, &pod_links), &redirecting);
        let mut links = uplinks.clone();
        links.extend(pod_links.clone());
        let (with_ethernet, without_ethernet) = links
            .clone()
            .into_iter()
            .partition(|(index, _)| header_of(index) == LinkHeader::Ethernet);
        let ranges = SenderRanges {
            local: self.settings.local_senders.ranges(&network.pod_ranges),
            forwarded: ranges_of(&self.settings.forwarded),
        };
        // The programs must know the link before the first packet is translated. The packets of this host need both programs on
        // all links.
        let mut first = described.clone();
        first.remove(&PacketLink::HOST);
        let mut results = vec![
            self.programs.set_ranges(&ranges),
            self.store_links(first),
            self.programs
                .attach(&with_ethernet, &without_ethernet, reattach),
            self.store_links(described),
        ];
        if network.problem.is_none() {
            results.push(self.remove_unused(&network, &links));
        }
        problems.extend(
            results
                .into_iter()
                .filter_map(Result::err)
                .map(|it| chain(&it)),
        );
        let is_well = problems.is_empty();
        let complete = self.programs.complete_links();
        let redirecting = Vec::from_iter(redirecting.into_values());
        let view = PacketsView {
            enabled: true,
            has_programs: links.keys().any(|index| complete.contains(index)),
            uplinks: uplinks.values().cloned().collect(),
            pod_links: pod_links.values().cloned().collect(),
            others: [self.programs.others(&links), self.filters.clone()].concat(),
            warnings: warnings
                .chain(network.links.missing_uplink())
                .chain(network.links.port_warnings.iter().cloned())
                .chain(uplinks.is_empty().then(|| NO_UPLINKS.to_owned()))
                .chain(self.kernel_warnings(&network, &uplinks, &links))
                .chain(self.redirect_warning(&redirecting))
                .collect(),
            redirecting,
            problem: (!is_well).then(|| problems.join("; ")),
        };
        self.publish(view);
        is_well
    }

    /// Returns the settings of the kernel that keep packets from backends, or replies from this host.
    fn kernel_warnings(
        &self,
        network: &NetworkState,
        uplinks: &BTreeMap<u32, String>,
        links: &BTreeMap<u32, String>,
    ) -> Vec<String> {
        let mut warnings = kernel_settings::forwarding(uplinks);
        if self.needs.borrow().replies_to_host {
            let default = network.snapshot.default_link(true);
            warnings.extend(kernel_settings::reverse_path(links, default));
        }
        warnings
    }

    /// Returns a warning if packets are sent past the network stack from these uplinks, or from none although the config says so.
    fn redirect_warning(&self, redirecting: &[String]) -> Option<String> {
        if self.settings.redirecting.is_empty() {
            return None;
        }
        Some(if redirecting.is_empty() {
            "no uplink is in service.packets.deliveryUplinks, so nothing is redirected".to_owned()
        } else {
            format!(
                "packets from {} to Services are redirected, so this host's FORWARD rules and NetworkPolicies don't see them",
                redirecting.join(", ")
            )
        })
    }

    fn publish(&self, view: PacketsView) {
        self.view.send_if_modified(|old| {
            if *old == view {
                return false;
            }
            let warnings = view.warnings.iter();
            for warning in warnings.filter(|warning| !old.warnings.contains(warning)) {
                warn!(%warning, "the translation of packets may not work as expected");
            }
            match &view.problem {
                Some(problem) => warn!(%problem, "cannot translate packets on all links"),
                None => {
                    info!(uplinks = ?view.uplinks, pod_links = view.pod_links.len(), "packets on these links are translated");
                }
            }
            *old = view;
            true
        });
    }

    /// Lists the filters of others on the links.
    async fn list_filters(&mut self, kernel: &RouteSocket) {
        let network = self.network.borrow().clone();
        let mut links = self.pod_links(&network);
        links.extend(network.links.uplinks.clone());
        self.filters = filters::others(kernel, &links).await;
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
                // Without the task that counts flows, the daemon stops.
                Ok(()) = self.needs.changed() => schedule.check_now(),
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

#[cfg(test)]
mod tests;
