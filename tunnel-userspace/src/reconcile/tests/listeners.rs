//! Frontends with a local listener.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::advance;
use tunnel_common::service::Frontend;

use super::*;
use crate::reconcile::listener_poll::ListenerPoll;

const EVERY: Duration = Duration::from_secs(1);

/// A fake kernel: its listeners, and the polls that it got.
#[derive(Default)]
struct Kernel {
    listeners: BTreeSet<FrontendKey>,
    fails: Option<bool>,
    asked: Vec<BTreeSet<FrontendKey>>,
}

/// A reconciler with polls of a fake kernel.
struct Scene {
    reconciler: Reconciler<Memory>,
    kernel: Arc<Mutex<Kernel>>,
    looks: ListenerPoll,
}

impl Scene {
    /// Starts on a node that has the addresses of these frontends, with some Services.
    fn new<const N: usize>(fronts: [FrontendKey; N], services: Vec<Change<'_>>) -> Self {
        let kernel = Arc::<Mutex<Kernel>>::default();
        let asked = Arc::clone(&kernel);
        let find = move |wanted: &BTreeSet<FrontendKey>| {
            let mut kernel = asked.lock().unwrap();
            kernel.asked.push(wanted.clone());
            match kernel.fails {
                None => Ok(kernel.listeners.clone()),
                Some(is_retryable) => Err(ListenerPollError {
                    is_retryable,
                    source: "no kernel".into(),
                }),
            }
        };
        let mut reconciler = adopt(Memory::new(ROOMY));
        reconciler.set_addresses(fronts.iter().map(ip).collect());
        reconciler.update(update(services));
        Self {
            reconciler,
            kernel,
            looks: ListenerPoll::new(Some(Box::new(find)), EVERY),
        }
    }

    /// Polls if a poll is due. Writes nothing.
    async fn poll(&mut self) {
        if self.looks.start_if_due(&mut self.reconciler) {
            let looked = self.looks.wait().await.expect("a poll");
            self.looks.apply_result(looked, &mut self.reconciler);
        }
    }

    /// Polls if a poll is due, and writes the changes.
    async fn look(&mut self) {
        self.poll().await;
        settle(&mut self.reconciler);
    }

    /// Waits for the interval, polls, and writes the changes.
    async fn look_later(&mut self) {
        advance(EVERY).await;
        self.look().await;
    }

    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    fn asked(&self) -> Vec<BTreeSet<FrontendKey>> {
        std::mem::take(&mut self.kernel().asked)
    }
}

fn ip(key: &FrontendKey) -> IpAddr {
    key.address.to_ip()
}

/// Returns the frontend of a VIP in its other family.
fn other(last: u8) -> FrontendKey {
    http_at(other_ip(last))
}

/// Returns a Service with both families and a node port.
fn both(name: &'static str, last: u8) -> Change<'static> {
    with(set(name, last, &[1]), |service| {
        service.cluster_ips.push(other_ip(last));
        service.ports[0].node_port = Some(30_000 + u16::from(last));
    })
}

/// Returns the frontends for which sockets are not translated.
fn left_alone(reconciler: &Reconciler<Memory>) -> BTreeSet<FrontendKey> {
    let maps = &reconciler.sync.tracked.maps;
    let is_left = |index: &u32| maps.front[index].flags & Frontend::NOT_SOCKETS != 0;
    let left = maps.svc.iter().filter(|(_, index)| is_left(index));
    left.map(|(key, _)| *key).collect()
}

#[test]
fn a_front_is_left_alone_while_this_node_listens_there_and_no_other_front_is() {
    let mut reconciler = serving(ROOMY, [both("web", 1), both("dns", 2)]);
    reconciler.set_addresses([ip(&vip(1)), ip(&other(1))].into());
    settle(&mut reconciler);
    let node_port = FrontendKey {
        port: Port::from_host(30_001),
        ..vip(1)
    };
    assert!(reconciler.maps().svc.contains_key(&node_port));

    // `vip(2)` is on another node, and node ports don't yield to listeners.
    reconciler.set_listeners([vip(1), other(1), vip(2), node_port].into());
    let web = ObjectName::new("default", "web");
    assert_eq!(reconciler.sync.dirty, BTreeSet::from([web]));
    settle(&mut reconciler);
    assert_eq!(left_alone(&reconciler), [vip(1), other(1)].into());
    let shown = services(&reconciler, Some("web"));
    let fronts = shown[0].ports.iter().flat_map(|port| &port.frontends);
    let told = fronts.filter(|front| front.local_listener);
    let told: BTreeSet<_> = told.map(|front| front.frontend.clone()).collect();
    assert_eq!(told, [vip(1), other(1)].map(|key| key.to_string()).into());

    reconciler.set_listeners([other(1)].into());
    settle(&mut reconciler);
    assert_eq!(left_alone(&reconciler), [other(1)].into());
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
}

#[test]
fn only_cluster_ips_give_way_to_a_listener() {
    let web = with(both("web", 1), |service| {
        service.external_ips = vec![ip(&vip(7))];
        service.load_balancer_ips = vec![ip(&vip(8))];
    });
    let mut reconciler = serving(ROOMY, [web]);
    reconciler.set_addresses([1, 7, 8].map(|last| ip(&vip(last))).into());

    reconciler.set_listeners([1, 7, 8].map(vip).into());
    settle(&mut reconciler);

    assert!(
        [7, 8]
            .iter()
            .all(|last| reconciler.maps().svc.contains_key(&vip(*last)))
    );
    assert_eq!(left_alone(&reconciler), [vip(1)].into());
}

#[tokio::test(start_paused = true)]
async fn nobody_looks_while_this_node_has_no_address_of_a_service() {
    let mut scene = Scene::new([vip(9)], vec![both("web", 1)]);

    scene.look().await;
    scene.look_later().await;
    assert!(scene.asked().is_empty() && scene.looks.next_at.is_none());

    // A Service gets the address, and is deleted again.
    apply(&mut scene.reconciler, vec![both("cache", 9)]);
    scene.look().await;
    assert_eq!(scene.asked(), [[vip(9)].into()]);
    assert!(scene.looks.next_at.is_some());
    apply(&mut scene.reconciler, vec![("cache", None)]);
    scene.look().await;
    assert!(scene.asked().is_empty() && scene.looks.next_at.is_none());
}

#[tokio::test(start_paused = true)]
async fn it_is_looked_at_once_when_something_is_new_and_then_every_so_often() {
    let mut scene = Scene::new([vip(1)], vec![both("web", 1)]);
    scene.kernel().listeners = [vip(1)].into();

    // The first poll precedes the first write.
    scene.look().await;
    assert_eq!(left_alone(&scene.reconciler), [vip(1)].into());
    scene.look().await;
    assert_eq!(scene.asked().len(), 1);

    scene.kernel().listeners.clear();
    scene.look_later().await;
    assert!(left_alone(&scene.reconciler).is_empty());
    assert_eq!(scene.asked().len(), 1);

    // The address is removed from the link between a poll that finds a listener and the write.
    scene.kernel().listeners = [vip(1)].into();
    advance(EVERY).await;
    scene.poll().await;
    assert_eq!(scene.asked().len(), 1);
    scene.reconciler.set_addresses(BTreeSet::new());
    scene.look().await;
    assert!(left_alone(&scene.reconciler).is_empty() && scene.looks.next_at.is_none());
}

#[tokio::test(start_paused = true)]
async fn what_is_known_stays_while_the_kernel_does_not_answer() {
    let mut scene = Scene::new([vip(1), vip(2)], vec![both("web", 1)]);
    scene.kernel().listeners = [vip(1)].into();
    scene.look().await;

    scene.kernel().fails = Some(true);
    scene.look_later().await;
    assert_eq!(left_alone(&scene.reconciler), [vip(1)].into());
    assert!(scene.looks.next_at.is_some(), "no retry is due");

    scene.kernel().fails = Some(false);
    scene.look_later().await;
    assert!(scene.looks.next_at.is_none(), "a useless retry is due");
    apply(&mut scene.reconciler, vec![both("dns", 2)]);
    scene.kernel().fails = None;
    scene.look().await;
    assert!(scene.looks.next_at.is_some());
}

#[tokio::test]
async fn a_service_waits_for_the_look_at_its_fronts_and_no_other_waits() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let (go, told) = std::sync::mpsc::channel();
    let find = move |_: &BTreeSet<FrontendKey>| {
        told.recv().expect("a signal to continue");
        Ok([vip(1)].into())
    };
    let mut looks = ListenerPoll::new(Some(Box::new(find)), EVERY);
    reconciler.waiting_for_poll.get_or_insert_default();
    apply(&mut reconciler, vec![]);
    reconciler.set_addresses([ip(&vip(1))].into());

    reconciler.update(update(vec![both("web", 1), both("dns", 2)]));
    looks.start_if_due(&mut reconciler);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), None);
    assert_eq!(backends(&reconciler, 2), Some(vec![1]));
    assert!(!reconciler.is_dirty(), "the waiting Service is retried");

    go.send(()).expect("a running poll");
    let looked = looks.wait().await.expect("a poll");
    looks.apply_result(looked, &mut reconciler);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(left_alone(&reconciler), [vip(1)].into());
    // This poll covers no new frontend, so no Service waits for it.
    looks.start_if_due(&mut reconciler);
    apply(&mut reconciler, vec![set("web", 1, &[2])]);
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
}
