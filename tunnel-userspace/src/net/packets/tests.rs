use std::sync::Arc;

use parking_lot::Mutex;
use rtnetlink::packet_route::link::{LinkAttribute, LinkLayerType, LinkMessage};

use super::{
    super::{
        snapshot::Snapshot,
        uplinks::{ClassifiedLinks, PodRanges},
    },
    *,
};

#[derive(Debug, thiserror::Error)]
#[error("a program can't be attached")]
struct Broken;

/// The programs' state in the kernel.
#[derive(Default)]
struct KernelState {
    /// The links that have one or both programs.
    attached: BTreeSet<u32>,
    /// The links that can't have both.
    broken: BTreeSet<u32>,
    known: BTreeMap<u32, TranslatedLink>,
}

/// Programs that are attached to no real link.
struct FakePrograms(Arc<Mutex<KernelState>>);

impl PacketPrograms for FakePrograms {
    type Error = Broken;

    fn attach(
        &mut self,
        with_ethernet: &BTreeMap<u32, String>,
        without_ethernet: &BTreeMap<u32, String>,
        _reattach: bool,
    ) -> Result<(), Broken> {
        let mut state = self.0.lock();
        let mut all = Ok(());
        for link in with_ethernet.keys().chain(without_ethernet.keys()) {
            let is_complete = state.attached.contains(link) && !state.broken.contains(link);
            let begins_flows = !state.known[link].known_flows_only;
            assert!(is_complete || !begins_flows, "{link}");
            state.attached.insert(*link);
            if state.broken.contains(link) {
                all = Err(Broken);
            }
        }
        all
    }

    fn load_without_ethernet(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn attached_links(&self) -> BTreeSet<u32> {
        self.0.lock().attached.clone()
    }

    fn complete_links(&self) -> BTreeSet<u32> {
        let state = self.0.lock();
        state.attached.difference(&state.broken).copied().collect()
    }

    fn remove_unused(&mut self, links: &BTreeMap<u32, String>) -> Result<(), Broken> {
        let mut state = self.0.lock();
        state.attached.retain(|link| links.contains_key(link));
        Ok(())
    }

    fn others(&self, _links: &BTreeMap<u32, String>) -> Vec<String> {
        Vec::new()
    }

    fn set_ranges(&mut self, _ranges: &SenderRanges) -> Result<(), Broken> {
        Ok(())
    }

    fn set_links(&mut self, links: &BTreeMap<u32, TranslatedLink>) -> Result<(), Broken> {
        self.0.lock().known.extend(links.clone());
        Ok(())
    }

    fn forget_other_links(&mut self, links: &BTreeSet<u32>) -> Result<(), Broken> {
        let mut state = self.0.lock();
        state.known.retain(|link, _| links.contains(link));
        Ok(())
    }
}

fn name(index: u32) -> String {
    format!("test{index}")
}

/// Returns the state of a network with these uplinks and links of pods, and no other links.
fn network(uplinks: &[u32], pod_links: &[u32]) -> NetworkState {
    let message = |index: &u32| {
        let mut message = LinkMessage::default();
        message.header.index = *index;
        message.header.link_layer_type = LinkLayerType::Ether;
        message.attributes = vec![LinkAttribute::IfName(name(*index))];
        message
    };
    let messages = Vec::from_iter(uplinks.iter().chain(pod_links).map(message));
    let named = |links: &[u32]| links.iter().map(|index| (*index, name(*index))).collect();
    NetworkState {
        snapshot: Arc::new(Snapshot::of(&messages, &[], Vec::new())),
        links: Arc::new(ClassifiedLinks {
            uplinks: named(uplinks),
            pod_links: named(pod_links),
            ..ClassifiedLinks::default()
        }),
        pod_ranges: PodRanges::default(),
        internal_ips: Vec::new(),
        problem: None,
    }
}

/// The same network while no link has a configured name, so that no link is known to lead outside or to pods.
fn without_uplink(mut network: NetworkState) -> NetworkState {
    network.links = Arc::new(ClassifiedLinks {
        missing: Some("gone".to_owned()),
        ..ClassifiedLinks::default()
    });
    network
}

/// The task, and its surroundings.
struct Scene {
    packets: PacketLinks<FakePrograms>,
    kernel: Arc<Mutex<KernelState>>,
    network: watch::Sender<NetworkState>,
    view: watch::Receiver<PacketsView>,
}

impl Scene {
    fn new(network: NetworkState) -> Self {
        let kernel = Arc::default();
        let network = watch::Sender::new(network);
        let view = watch::Sender::default();
        let shown = view.subscribe();
        let settings = PacketLinkSettings {
            check_interval: Duration::from_secs(2),
            local_senders: LocalSenders::Unknown,
            uses_node_address: false,
            includes_pod_links: true,
            redirecting: Vec::new(),
            forwarded: Vec::new(),
        };
        let inputs = (network.subscribe(), watch::Sender::default().subscribe());
        let programs = FakePrograms(Arc::clone(&kernel));
        Self {
            packets: PacketLinks::new(programs, inputs, settings, view),
            kernel,
            network,
            view: shown,
        }
    }

    /// Returns the links that have the programs, and those that the programs know.
    fn links(&self) -> (Vec<u32>, Vec<u32>) {
        let kernel = self.kernel.lock();
        let known = kernel.known.keys().copied();
        (kernel.attached.iter().copied().collect(), known.collect())
    }

    /// Returns the links on which flows begin.
    fn beginnings(&self) -> Vec<u32> {
        let kernel = self.kernel.lock();
        let known = kernel.known.iter();
        let begin = known.filter(|(_, link)| !link.known_flows_only);
        begin.map(|(index, _)| *index).collect()
    }
}

#[test]
fn only_links_that_are_gone_lose_their_programs_while_an_uplink_is_missing() {
    let mut scene = Scene::new(network(&[2, 3], &[4, 5]));
    assert!(scene.packets.check(false));
    assert_eq!(scene.links(), (vec![2, 3, 4, 5], vec![0, 2, 3, 4, 5]));

    let smaller = without_uplink(network(&[2], &[4]));
    scene.network.send_replace(NetworkState {
        problem: Some("not read".to_owned()),
        ..smaller.clone()
    });
    assert!(!scene.packets.check(false));
    assert_eq!(scene.links(), (vec![2, 3, 4, 5], vec![0, 2, 3, 4, 5]));

    scene.network.send_replace(smaller);
    assert!(scene.packets.check(false));
    assert_eq!(scene.links(), (vec![2, 4], vec![0, 2, 4]));
    let warning = "service.uplinks names gone, but this node has no such link";
    let warnings = scene.view.borrow().warnings.clone();
    assert!(warnings.iter().any(|it| it == warning), "{warnings:?}");

    scene.network.send_replace(network(&[2], &[]));
    assert!(scene.packets.check(false));
    assert_eq!(scene.links(), (vec![2], vec![0, 2]));
}

#[test]
fn flows_begin_only_on_links_with_both_programs() {
    let mut scene = Scene::new(network(&[2, 3], &[4, 5]));
    scene.kernel.lock().broken = BTreeSet::from([3, 5]);
    for _ in 0..2 {
        assert!(!scene.packets.check(false));
        assert_eq!(scene.beginnings(), [0, 2, 4]);
    }

    scene.kernel.lock().broken = BTreeSet::from([4]);
    assert!(!scene.packets.check(true));
    assert_eq!(scene.beginnings(), [0, 2, 3, 5]);

    scene.kernel.lock().broken.clear();
    assert!(scene.packets.check(false));
    assert_eq!(scene.beginnings(), [0, 2, 3, 4, 5]);
}
