//! Fronts where something of this node listens itself.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::advance;
use tunnel_common::service::Front;

use super::*;
use crate::reconcile::listener_poll::ListenerPoll;

const EVERY: Duration = Duration::from_secs(1);

/// What a kernel would say, and how often it was asked.
#[derive(Default)]
struct Kernel {
    listeners: BTreeSet<FrontKey>,
    fails: Option<bool>,
    asked: Vec<BTreeSet<FrontKey>>,
}

fn looks(kernel: &Arc<Mutex<Kernel>>) -> ListenerPoll {
    let kernel = Arc::clone(kernel);
    let find = move |wanted: &BTreeSet<FrontKey>| {
        let mut kernel = kernel.lock().unwrap_or_else(PoisonError::into_inner);
        kernel.asked.push(wanted.clone());
        match kernel.fails {
            None => Ok(kernel.listeners.clone()),
            Some(is_retryable) => Err(LookError {
                is_retryable,
                source: "no kernel".into(),
            }),
        }
    };
    ListenerPoll::new(Some(Box::new(find)), EVERY)
}

/// ListenerPoll, if it is time, and takes what was found.
async fn look(looks: &mut ListenerPoll, reconciler: &mut Reconciler<Memory>) {
    if looks.look(reconciler) {
        let looked = looks.ended().await.expect("a look");
        looks.end(looked, reconciler);
    }
}

fn change<T>(kernel: &Arc<Mutex<Kernel>>, change: impl FnOnce(&mut Kernel) -> T) -> T {
    change(&mut kernel.lock().unwrap_or_else(PoisonError::into_inner))
}

fn asked(kernel: &Arc<Mutex<Kernel>>) -> Vec<BTreeSet<FrontKey>> {
    change(kernel, |kernel| std::mem::take(&mut kernel.asked))
}

fn ip(key: &FrontKey) -> IpAddr {
    key.address.to_ip()
}

/// The front of a Service in its other family.
fn other(last: u8) -> FrontKey {
    let address = Address::from_ip(other_ip(last));
    FrontKey::new(address, Port::from_host(80), Protocol::TCP)
}

/// A Service of both families, with a node port.
fn both(name: &'static str, last: u8) -> (&'static str, Option<ServiceState>) {
    let mut state = state(name, last, &BTreeSet::from([1]));
    let service = Arc::make_mut(&mut state.service);
    service.cluster_ips.push(other_ip(last));
    service.ports[0].node_port = Some(30_000 + u16::from(last));
    (name, Some(state))
}

/// The fronts that are programmed as not for sockets.
fn left_alone(reconciler: &Reconciler<Memory>) -> BTreeSet<FrontKey> {
    let maps = &reconciler.sync.ports.maps;
    let is_left = |index: &u32| maps.front[index].flags & Front::NOT_SOCKETS != 0;
    let left = maps.svc.iter().filter(|(_, index)| is_left(index));
    left.map(|(key, _)| *key).collect()
}

#[test]
fn a_front_is_left_alone_while_this_node_listens_there_and_no_other_front_is() {
    let mut reconciler = serving(ROOMY, [both("web", 1), both("dns", 2)]);
    reconciler.set_addresses([ip(&vip(1)), ip(&other(1))].into());
    settle(&mut reconciler);
    let node_port = FrontKey {
        port: Port::from_host(30_001),
        ..vip(1)
    };
    assert!(reconciler.maps().svc.contains_key(&node_port));

    // One of them is another node's address, one a node port.
    reconciler.set_listeners([vip(1), other(1), vip(2), node_port].into());
    let web = ObjectName::new("default", "web");
    assert_eq!(reconciler.sync.dirty, BTreeSet::from([web]));
    settle(&mut reconciler);
    assert_eq!(left_alone(&reconciler), [vip(1), other(1)].into());
    let shown = reconciler.services(Some("web"));
    let fronts = shown[0].ports.iter().flat_map(|port| &port.fronts);
    let told = fronts.filter(|front| front.has_listener);
    let told: BTreeSet<_> = told.map(|front| front.front.clone()).collect();
    assert_eq!(told, [vip(1), other(1)].map(|key| key.to_string()).into());

    reconciler.set_listeners([other(1)].into());
    settle(&mut reconciler);
    assert_eq!(left_alone(&reconciler), [other(1)].into());
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
}

#[test]
fn only_cluster_ips_give_way_to_a_listener() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let (name, mut web) = both("web", 1);
    let service = web.as_mut().map(|web| Arc::make_mut(&mut web.service));
    let service = service.expect("a Service");
    service.external_ips = vec![ip(&vip(7))];
    service.load_balancer_ips = vec![ip(&vip(8))];
    apply(&mut reconciler, vec![(name, web)]);
    reconciler.set_addresses([1, 7, 8].map(|last| ip(&vip(last))).into());

    reconciler.set_listeners([1, 7, 8].map(vip).into());
    settle(&mut reconciler);

    assert!(
        reconciler.maps().svc.contains_key(&vip(7)) && reconciler.maps().svc.contains_key(&vip(8))
    );
    assert_eq!(left_alone(&reconciler), [vip(1)].into());
}

#[tokio::test(start_paused = true)]
async fn nobody_looks_while_this_node_has_no_address_of_a_service() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let kernel = Arc::default();
    let mut looks = looks(&kernel);
    apply(&mut reconciler, vec![both("web", 1)]);
    reconciler.set_addresses([ip(&vip(9))].into());

    look(&mut looks, &mut reconciler).await;
    advance(EVERY).await;
    look(&mut looks, &mut reconciler).await;
    assert!(asked(&kernel).is_empty() && looks.at.is_none());

    // A Service comes to the address, and goes again.
    apply(&mut reconciler, vec![both("cache", 9)]);
    look(&mut looks, &mut reconciler).await;
    assert_eq!(asked(&kernel), [[vip(9)].into()]);
    assert!(looks.at.is_some());
    apply(&mut reconciler, vec![("cache", None)]);
    look(&mut looks, &mut reconciler).await;
    assert!(asked(&kernel).is_empty() && looks.at.is_none());
}

#[tokio::test(start_paused = true)]
async fn it_is_looked_at_once_when_something_is_new_and_then_every_so_often() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let kernel = Arc::default();
    let mut looks = looks(&kernel);
    reconciler.set_addresses([ip(&vip(1))].into());
    reconciler.update(update(vec![both("web", 1)]));
    change(&kernel, |kernel| kernel.listeners = [vip(1)].into());

    // Before anything is written.
    look(&mut looks, &mut reconciler).await;
    settle(&mut reconciler);
    assert_eq!(left_alone(&reconciler), [vip(1)].into());
    look(&mut looks, &mut reconciler).await;
    assert_eq!(asked(&kernel).len(), 1);

    change(&kernel, |kernel| kernel.listeners.clear());
    advance(EVERY).await;
    look(&mut looks, &mut reconciler).await;
    settle(&mut reconciler);
    assert!(left_alone(&reconciler).is_empty());
    assert_eq!(asked(&kernel).len(), 1);

    // The address goes from the link while something listens.
    change(&kernel, |kernel| kernel.listeners = [vip(1)].into());
    advance(EVERY).await;
    look(&mut looks, &mut reconciler).await;
    reconciler.set_addresses(BTreeSet::new());
    look(&mut looks, &mut reconciler).await;
    settle(&mut reconciler);
    assert!(left_alone(&reconciler).is_empty() && looks.at.is_none());
}

#[tokio::test(start_paused = true)]
async fn what_is_known_stays_while_the_kernel_does_not_answer() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let kernel = Arc::default();
    let mut looks = looks(&kernel);
    reconciler.set_addresses([ip(&vip(1)), ip(&vip(2))].into());
    apply(&mut reconciler, vec![both("web", 1)]);
    change(&kernel, |kernel| kernel.listeners = [vip(1)].into());
    look(&mut looks, &mut reconciler).await;

    change(&kernel, |kernel| kernel.fails = Some(true));
    advance(EVERY).await;
    look(&mut looks, &mut reconciler).await;
    settle(&mut reconciler);
    assert_eq!(left_alone(&reconciler), [vip(1)].into());
    assert!(looks.at.is_some(), "it is tried again");

    change(&kernel, |kernel| kernel.fails = Some(false));
    advance(EVERY).await;
    look(&mut looks, &mut reconciler).await;
    assert!(looks.at.is_none(), "in vain");
    apply(&mut reconciler, vec![both("dns", 2)]);
    change(&kernel, |kernel| kernel.fails = None);
    look(&mut looks, &mut reconciler).await;
    assert!(looks.at.is_some());
}

#[tokio::test]
async fn a_service_waits_for_the_look_at_its_fronts_and_no_other_waits() {
    let mut reconciler = adopt(Memory::new(ROOMY));
    let (go, told) = std::sync::mpsc::channel();
    let find = move |_: &BTreeSet<FrontKey>| {
        told.recv().expect("told");
        Ok([vip(1)].into())
    };
    let mut looks = ListenerPoll::new(Some(Box::new(find)), EVERY);
    reconciler.held_back.get_or_insert_default();
    apply(&mut reconciler, vec![]);
    reconciler.set_addresses([ip(&vip(1))].into());

    reconciler.update(update(vec![both("web", 1), both("dns", 2)]));
    looks.look(&mut reconciler);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), None);
    assert_eq!(backends(&reconciler, 2), Some(vec![1]));
    assert!(!reconciler.is_dirty(), "it is tried again in vain");

    go.send(()).expect("a look");
    let looked = looks.ended().await.expect("a look");
    looks.end(looked, &mut reconciler);
    settle(&mut reconciler);
    assert_eq!(backends(&reconciler, 1), Some(vec![1]));
    assert_eq!(left_alone(&reconciler), [vip(1)].into());
    // The next look is of what is known, and nobody waits for it.
    looks.look(&mut reconciler);
    apply(&mut reconciler, vec![set("web", 1, &[2])]);
    assert_eq!(backends(&reconciler, 1), Some(vec![2]));
}
