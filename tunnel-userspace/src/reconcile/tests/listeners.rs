//! Frontends that have a local listener.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::advance;
use tunnel_common::service::Frontend;

use super::*;
use crate::reconcile::listener_poll::{ListenerPoll, ListeningUsers};

const EVERY: Duration = Duration::from_secs(1);

/// A fake kernel, with its listeners and the polls it has received.
#[derive(Default)]
struct FakeKernel {
    listeners: ListeningUsers,
    fails: Option<bool>,
    polls: Vec<BTreeSet<FrontendKey>>,
}

/// A reconciler that polls a fake kernel for listeners.
struct Fixture {
    reconciler: Reconciler<Memory>,
    kernel: Arc<Mutex<FakeKernel>>,
    listener_poll: ListenerPoll,
}

impl Fixture {
    /// Creates a reconciler with the given Services, on a node that has the addresses of the given frontends.
    fn new<const N: usize>(frontends: [FrontendKey; N], services: Vec<Change<'_>>) -> Self {
        let kernel = Arc::<Mutex<FakeKernel>>::default();
        let asked = Arc::clone(&kernel);
        let find = move |wanted: &BTreeSet<FrontendKey>| {
            let mut kernel = asked.lock().unwrap();
            kernel.polls.push(wanted.clone());
            match kernel.fails {
                None => Ok(kernel.listeners.clone()),
                Some(is_retryable) => Err(ListenerPollError {
                    is_retryable,
                    source: "no kernel".into(),
                }),
            }
        };
        let mut reconciler = adopt(Memory::new(ROOMY));
        reconciler.set_addresses(frontends.iter().map(ip).collect());
        reconciler.update(update(services));
        Self {
            reconciler,
            kernel,
            listener_poll: ListenerPoll::new(Some(Box::new(find)), EVERY),
        }
    }

    /// Polls if a poll is due. Doesn't write to the maps.
    async fn poll(&mut self) {
        if self.listener_poll.start_if_due(&mut self.reconciler) {
            let looked = self.listener_poll.wait().await.expect("a poll");
            self.listener_poll
                .apply_result(looked, &mut self.reconciler);
        }
    }

    /// Polls if a poll is due, and then writes the changes.
    async fn poll_and_write(&mut self) {
        self.poll().await;
        settle(&mut self.reconciler);
    }

    /// Waits for one polling interval, polls, and writes the changes.
    async fn poll_after_interval(&mut self) {
        advance(EVERY).await;
        self.poll_and_write().await;
    }

    fn kernel(&self) -> MutexGuard<'_, FakeKernel> {
        self.kernel.lock().unwrap()
    }

    fn take_polls(&self) -> Vec<BTreeSet<FrontendKey>> {
        std::mem::take(&mut self.kernel().polls)
    }
}

fn ip(key: &FrontendKey) -> IpAddr {
    key.address.to_ip()
}

/// Returns the frontend of a VIP in the other address family.
fn other_vip(last: u8) -> FrontendKey {
    http_at(other_ip(last))
}

/// Returns a dual-stack Service with a node port.
fn dual_stack(name: &'static str, last: u8) -> Change<'static> {
    with(set(name, last, &[1]), |service| {
        service.cluster_ips.push(other_ip(last));
        service.ports[0].node_port = Some(30_000 + u16::from(last));
    })
}

/// Returns these frontends as frontends that have a listener of root.
fn by_root<const N: usize>(frontends: [FrontendKey; N]) -> ListeningUsers {
    frontends.map(|frontend| (frontend, [0].into())).into()
}

/// Returns the frontends for which sockets are not translated.
fn untranslated(reconciler: &Reconciler<Memory>) -> BTreeSet<FrontendKey> {
    let maps = &reconciler.sync.tracked.maps;
    let is_left = |index: &u32| maps.frontends[index].flags & Frontend::NOT_SOCKETS != 0;
    let left = maps
        .frontend_keys
        .iter()
        .filter(|(_, index)| is_left(index));
    left.map(|(key, _)| *key).collect()
}

#[test]
fn only_frontends_with_a_local_listener_are_not_translated() {
    let mut reconciler = serving(ROOMY, [dual_stack("web", 1), dual_stack("dns", 2)]);
    reconciler.set_addresses([ip(&vip(1)), ip(&other_vip(1))].into());
    settle(&mut reconciler);
    let node_port = FrontendKey {
        port: Port::from_host(30_001),
        ..vip(1)
    };
    assert!(reconciler.maps().frontend_keys.contains_key(&node_port));

    // The address of `vip(2)` is not on this node, and node ports don't yield to listeners.
    reconciler.set_listeners(by_root([vip(1), other_vip(1), vip(2), node_port]));
    let web = ObjectName::new("default", "web");
    assert_eq!(reconciler.sync.dirty, BTreeSet::from([web]));
    settle(&mut reconciler);
    assert_eq!(untranslated(&reconciler), [vip(1), other_vip(1)].into());
    let published = services(&reconciler, Some("web"));
    let frontends = published[0].ports.iter().flat_map(|port| &port.frontends);
    let with_listener = frontends.filter(|frontend| frontend.local_listener);
    let with_listener: BTreeSet<_> = with_listener
        .map(|frontend| frontend.frontend.clone())
        .collect();
    assert_eq!(
        with_listener,
        [vip(1), other_vip(1)].map(|key| key.to_string()).into()
    );

    reconciler.set_listeners(by_root([other_vip(1)]));
    settle(&mut reconciler);
    assert_eq!(untranslated(&reconciler), [other_vip(1)].into());
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
}

#[test]
fn only_cluster_ips_yield_to_a_local_listener() {
    let web = with(dual_stack("web", 1), |service| {
        service.external_ips = vec![ip(&vip(7))];
        service.load_balancer_ips = vec![ip(&vip(8))];
    });
    let mut reconciler = serving(ROOMY, [web]);
    reconciler.set_addresses([1, 7, 8].map(|last| ip(&vip(last))).into());

    reconciler.set_listeners(by_root([1, 7, 8].map(vip)));
    settle(&mut reconciler);

    assert!(
        [7, 8]
            .iter()
            .all(|last| reconciler.maps().frontend_keys.contains_key(&vip(*last)))
    );
    assert_eq!(untranslated(&reconciler), [vip(1)].into());
}

#[test]
fn only_listeners_of_trusted_users_take_the_place_of_a_service() {
    let settings = PlanSettings {
        local_listeners: [0, 53].into(),
        ..settings()
    };
    let mut reconciler = adopt_with(Memory::new(ROOMY), settings);
    reconciler.set_addresses([1, 2, 3].map(|last| ip(&vip(last))).into());
    let changes = [("web", 1), ("dns", 2), ("both", 3)];
    let changes = changes.map(|(name, last)| set(name, last, &[1]));
    apply(&mut reconciler, changes.into());

    let users = [
        (vip(1), [1000].into()),
        (vip(2), [53].into()),
        (vip(3), [0, 65_534].into()),
    ];
    reconciler.set_listeners(users.clone().into());
    settle(&mut reconciler);

    // Beside the listener of root, another user's listener may get the datagrams.
    assert_eq!(untranslated(&reconciler), [vip(2)].into());
    let ignored = |reconciler: &Reconciler<Memory>| {
        let user =
            |name| services(reconciler, Some(name))[0].ports[0].frontends[0].ignored_listener_user;
        ["web", "dns", "both"].map(user)
    };
    assert_eq!(ignored(&reconciler), [Some(1000), None, Some(65_534)]);
    let warnings = reconciler.warnings(&BTreeSet::new());
    let notes: Vec<_> = warnings
        .iter()
        .map(|warning| (&*warning.regarding.name.name, &*warning.note))
        .collect();
    let note = "the listener of user 1000 on [fd00:10:96::1]:80/TCP is ignored: service.localListeners does not \
                contain this user";
    assert_eq!(notes[0], ("web", note));
    assert_eq!(notes.len(), 2);
    let count = |reconciler: &Reconciler<Memory>| {
        reconciler
            .sync
            .problems
            .reason_counts
            .get(&Reason::ListenerIgnored)
            .copied()
    };
    assert_eq!(count(&reconciler), Some(2));

    // The same listeners change nothing, and a listener that is gone is no longer reported.
    reconciler.set_listeners(users.into());
    assert!(!reconciler.is_dirty());
    reconciler.set_listeners(by_root([vip(1)]));
    settle(&mut reconciler);
    assert_eq!(untranslated(&reconciler), [vip(1)].into());
    assert_eq!(ignored(&reconciler), [None; 3]);
    assert_eq!(count(&reconciler), Some(2));
}

#[tokio::test(start_paused = true)]
async fn there_is_no_poll_while_this_node_has_no_address_of_a_service() {
    let mut scene = Fixture::new([vip(9)], vec![dual_stack("web", 1)]);

    scene.poll_and_write().await;
    scene.poll_after_interval().await;
    assert!(scene.take_polls().is_empty() && scene.listener_poll.next_at.is_none());

    // A Service gets the address and is then deleted.
    apply(&mut scene.reconciler, vec![dual_stack("cache", 9)]);
    scene.poll_and_write().await;
    assert_eq!(scene.take_polls(), [[vip(9)].into()]);
    assert!(scene.listener_poll.next_at.is_some());
    apply(&mut scene.reconciler, vec![("cache", None)]);
    scene.poll_and_write().await;
    assert!(scene.take_polls().is_empty() && scene.listener_poll.next_at.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_poll_follows_each_change_at_once_and_then_each_interval() {
    let mut scene = Fixture::new([vip(1)], vec![dual_stack("web", 1)]);
    scene.kernel().listeners = by_root([vip(1)]);

    // The first poll precedes the first write.
    scene.poll_and_write().await;
    assert_eq!(untranslated(&scene.reconciler), [vip(1)].into());
    scene.poll_and_write().await;
    assert_eq!(scene.take_polls().len(), 1);

    scene.kernel().listeners.clear();
    scene.poll_after_interval().await;
    assert!(untranslated(&scene.reconciler).is_empty());
    assert_eq!(scene.take_polls().len(), 1);

    // The address is removed from the network interface after a poll has found a listener but before the
    // write.
    scene.kernel().listeners = by_root([vip(1)]);
    advance(EVERY).await;
    scene.poll().await;
    assert_eq!(scene.take_polls().len(), 1);
    scene.reconciler.set_addresses(BTreeSet::new());
    scene.poll_and_write().await;
    assert!(untranslated(&scene.reconciler).is_empty() && scene.listener_poll.next_at.is_none());
}

#[tokio::test(start_paused = true)]
async fn known_listeners_stay_while_polls_fail() {
    let mut scene = Fixture::new([vip(1), vip(2)], vec![dual_stack("web", 1)]);
    scene.kernel().listeners = by_root([vip(1)]);
    scene.poll_and_write().await;

    scene.kernel().fails = Some(true);
    scene.poll_after_interval().await;
    assert_eq!(untranslated(&scene.reconciler), [vip(1)].into());
    assert!(scene.listener_poll.next_at.is_some(), "no retry is due");

    scene.kernel().fails = Some(false);
    scene.poll_after_interval().await;
    assert!(
        scene.listener_poll.next_at.is_none(),
        "a useless retry is due"
    );
    apply(&mut scene.reconciler, vec![dual_stack("dns", 2)]);
    scene.kernel().fails = None;
    scene.poll_and_write().await;
    assert!(scene.listener_poll.next_at.is_some());
}

#[tokio::test]
async fn only_services_with_unpolled_frontends_wait_for_a_poll() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let (go, signal) = std::sync::mpsc::channel();
    let find = move |_: &BTreeSet<FrontendKey>| {
        signal.recv().expect("a signal to continue");
        Ok(by_root([vip(1)]))
    };
    let mut listener_poll = ListenerPoll::new(Some(Box::new(find)), EVERY);
    reconciler.waiting_for_poll.get_or_insert_default();
    apply(&mut reconciler, vec![]);
    reconciler.set_addresses([ip(&vip(1))].into());

    reconciler.update(update(vec![dual_stack("web", 1), dual_stack("dns", 2)]));
    listener_poll.start_if_due(&mut reconciler);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), None);
    assert_eq!(backends(&reconciler, 2), Some(vec![1]));
    assert!(!reconciler.is_dirty(), "the waiting Service is retried");

    go.send(()).expect("a running poll");
    let looked = listener_poll.wait().await.expect("a poll");
    listener_poll.apply_result(looked, &mut reconciler);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(untranslated(&reconciler), [vip(1)].into());
    // This poll covers no new frontends, so no Service waits for it.
    listener_poll.start_if_due(&mut reconciler);
    apply(&mut reconciler, vec![set("web", 1, &[2])]);
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
}
