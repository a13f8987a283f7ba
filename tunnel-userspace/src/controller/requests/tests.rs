//! Interleavings of several controllers, each of which may be stopped between any two of its accesses.

use std::{
    collections::BTreeMap,
    future::Future,
    mem,
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll},
};

use futures_util::task::noop_waker_ref;
use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequestSpec,
    core::v1::{ConfigMap, Secret},
};
use proptest::prelude::*;
use x509_parser::{certificate::X509Certificate, pem::Pem, prelude::FromDer as _};

use super::*;
use crate::{
    controller::{ca_keeper::RENEW, table::NodeFacts},
    identity::request,
};

const AGENTS: &str = "system:serviceaccount:kube-system:culvert-agent";
const DAY: SignedDuration = SignedDuration::from_hours(24);
const UID: &str = "5b1e0a7c";

/// The objects in memory. Other controllers may run before each access.
#[derive(Default)]
struct Memory(Mutex<Objects>);

#[derive(Default)]
struct Objects {
    secret: Secret,
    trust: ConfigMap,
    requests: BTreeMap<String, CertificateSigningRequest>,
    events: Vec<NodeEvent>,
    version: u64,
    now: Timestamp,
    outcomes: Vec<Outcome>,
}

/// Is pending once.
struct YieldOnce(bool);

impl Future for YieldOnce {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        if mem::replace(&mut self.0, true) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

impl Memory {
    fn at_once<T>(&self, access: impl FnOnce(&mut Objects) -> T) -> T {
        access(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn access<T>(&self, access: impl FnOnce(&mut Objects) -> T) -> T {
        YieldOnce(false).await;
        self.at_once(access)
    }
}

impl Objects {
    /// Replaces an object, if its version is still the same.
    fn replace<T: kube::Resource>(
        version: &mut u64,
        object: &mut T,
        mut new: T,
    ) -> Result<(), ClusterError> {
        if object.meta().resource_version != new.meta().resource_version {
            return Err(ClusterError::Conflict);
        }
        *version += 1;
        new.meta_mut().resource_version = Some(version.to_string());
        *object = new;
        Ok(())
    }

    fn replace_request(&mut self, new: CertificateSigningRequest) -> Result<(), ClusterError> {
        let name = new.metadata.name.clone().expect("a name");
        let object = self.requests.get_mut(&name).expect("it exists");
        Self::replace(&mut self.version, object, new)
    }

    fn trusted(&self) -> Vec<String> {
        let data = self.trust.data.as_ref();
        let pem = data.and_then(|data| data.get(ca_keeper::TRUST_KEY));
        subjects_and_issuers(pem.map_or("", String::as_str).as_bytes())
            .into_iter()
            .map(|(subject, ..)| subject)
            .collect()
    }

    /// Checks that every certificate that was issued is trusted until it expires.
    fn check_trust(&self) {
        let trusted = self.trusted();
        for request in self.requests.values() {
            let Some(certificate) = request
                .status
                .as_ref()
                .and_then(|it| it.certificate.as_ref())
            else {
                continue;
            };
            for (_, issuer, expires) in subjects_and_issuers(&certificate.0) {
                assert!(
                    trusted.contains(&issuer) || expires < self.now.as_second(),
                    "{issuer} is not among {trusted:?}"
                );
            }
        }
    }
}

fn subjects_and_issuers(pem: &[u8]) -> Vec<(String, String, i64)> {
    Pem::iter_from_buffer(pem)
        .map(|section| {
            let section = section.expect("PEM");
            let (_, parsed) = X509Certificate::from_der(&section.contents).expect("a certificate");
            let expires = parsed.validity().not_after.timestamp();
            (
                parsed.subject().to_string(),
                parsed.issuer().to_string(),
                expires,
            )
        })
        .collect()
}

impl Cluster for Memory {
    fn now(&self) -> Timestamp {
        self.at_once(|it| it.now)
    }

    async fn ca(&self) -> Result<Secret, ClusterError> {
        self.access(|it| Ok(it.secret.clone())).await
    }

    async fn replace_ca(&self, secret: Secret) -> Result<(), ClusterError> {
        self.access(|it| Objects::replace(&mut it.version, &mut it.secret, secret))
            .await
    }

    async fn trust(&self) -> Result<ConfigMap, ClusterError> {
        self.access(|it| Ok(it.trust.clone())).await
    }

    async fn replace_trust(&self, trust: ConfigMap) -> Result<(), ClusterError> {
        self.access(|it| {
            Objects::replace(&mut it.version, &mut it.trust, trust)?;
            it.check_trust();
            Ok(())
        })
        .await
    }

    async fn node(&self, _name: &str) -> Result<Option<NodeFacts>, ClusterError> {
        self.access(|_| {
            Ok(Some(NodeFacts {
                uid: UID.to_owned(),
                is_being_deleted: false,
            }))
        })
        .await
    }

    async fn replace_approval(
        &self,
        request: CertificateSigningRequest,
    ) -> Result<CertificateSigningRequest, ClusterError> {
        self.access(|it| {
            let name = request.metadata.name.clone().unwrap_or_default();
            it.replace_request(request)?;
            Ok(it.requests[&name].clone())
        })
        .await
    }

    async fn replace_status(&self, request: CertificateSigningRequest) -> Result<(), ClusterError> {
        self.access(|it| {
            let name = request.metadata.name.clone().unwrap_or_default();
            let before = it.requests[&name].status.clone().unwrap_or_default();
            let is_approved = has_condition(&request, APPROVED);
            it.replace_request(request)?;
            assert!(is_approved, "only approved ones are signed");
            assert!(before.certificate.is_none(), "each request is signed once");
            it.check_trust();
            Ok(())
        })
        .await
    }

    async fn report(&self, event: NodeEvent) -> Result<(), ClusterError> {
        self.access(|it| {
            it.events.push(event);
            Ok(())
        })
        .await
    }
}

fn settings() -> RequestSettings {
    RequestSettings {
        rules: Rules {
            agents: AGENTS.to_owned(),
            gateways: String::new(),
            max_life: (DAY * 30).as_secs(),
        },
        ca: CaSettings {
            ca_life: DAY * 3650,
            overlap: DAY * 7,
            life: DAY * 30,
        },
    }
}

/// Returns a request for a node's agent, made by a pod on a node.
fn request(number: usize, is_honest: bool) -> CertificateSigningRequest {
    let name = format!("edge-{number}");
    let pem = request::create(Role::Agent, &name)
        .expect("a request")
        .request;
    let by = if is_honest {
        name.clone()
    } else {
        "edge-evil".to_owned()
    };
    let extra = [
        ("authentication.kubernetes.io/node-name", by),
        ("authentication.kubernetes.io/node-uid", UID.to_owned()),
    ];
    CertificateSigningRequest {
        metadata: kube::api::ObjectMeta {
            name: Some(name),
            ..Default::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(pem.into_bytes()),
            signer_name: Role::Agent.signer().to_owned(),
            usages: Some(vec![
                "digital signature".to_owned(),
                "client auth".to_owned(),
            ]),
            username: Some(AGENTS.to_owned()),
            extra: Some(
                extra
                    .map(|(key, value)| (key.to_owned(), vec![value]))
                    .into(),
            ),
            ..Default::default()
        },
        status: None,
    }
}

/// Runs one controller until all requests are done.
async fn control(memory: &Memory, deny_list: &DenyList) {
    let settings = settings();
    loop {
        let requests: Vec<_> = memory
            .access(|it| it.requests.values().cloned().collect())
            .await;
        if requests.iter().all(is_done) {
            return;
        }
        for request in requests {
            let outcome = Box::pin(handle(memory, &settings, deny_list, request)).await;
            match outcome {
                Ok(outcome) => memory.at_once(|it| it.outcomes.push(outcome)),
                // It is handled again later.
                Err(HandleError::Ca(CaKeeperError::Contended)) => {}
                Err(error) => panic!("the memory never fails: {error}"),
            }
        }
    }
}

/// The next thing that happens.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A controller makes its next access.
    Step(usize),
    /// A controller is stopped, and started again.
    Kill(usize),
    /// Days pass.
    Days(u8),
    /// Somebody asks for a new CA.
    Renew,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        30 => (0..2_usize).prop_map(Event::Step),
        3 => (0..2_usize).prop_map(Event::Kill),
        1 => (1..10_u8).prop_map(Event::Days),
        1 => Just(Event::Renew),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn controllers_that_are_stopped_anywhere_leave_a_state_that_others_finish(
        events in prop::collection::vec(event(), 0..120),
    ) {
        const HONEST: usize = 3;
        let memory = Memory::default();
        memory.at_once(|it| {
            it.now = "2026-11-30T12:00:00Z".parse().expect("a time");
            for number in 0..HONEST + 1 {
                let request = request(number, number < HONEST);
                it.requests.insert(request.metadata.name.clone().expect("a name"), request);
            }
        });
        let deny_list = DenyList::default();
        let start = || Box::pin(control(&memory, &deny_list));
        let mut running = [start(), start()];
        let mut finished = [false; 2];
        let mut context = Context::from_waker(noop_waker_ref());
        for event in events {
            match event {
                Event::Step(which) if finished[which] => {}
                Event::Step(which) => {
                    finished[which] = running[which].as_mut().poll(&mut context).is_ready();
                }
                Event::Kill(which) => {
                    running[which] = start();
                    finished[which] = false;
                }
                Event::Days(days) => memory.at_once(|it| {
                    it.now += DAY * i32::from(days);
                    it.check_trust();
                }),
                Event::Renew => memory.at_once(|it| {
                    let annotations = it.secret.metadata.annotations.get_or_insert_default();
                    annotations.insert(RENEW.to_owned(), String::new());
                    it.version += 1;
                    it.secret.metadata.resource_version = Some(it.version.to_string());
                }),
            }
        }

        let mut last = start();
        let is_finished = (0..10_000).any(|_| last.as_mut().poll(&mut context).is_ready());

        prop_assert!(is_finished);
        memory.at_once(|it| {
            it.check_trust();
            for (number, request) in it.requests.values().enumerate() {
                let has_certificate = request.status.as_ref().is_some_and(|it| it.certificate.is_some());
                assert_eq!(has_certificate, number < HONEST);
                assert_eq!(has_condition(request, DENIED), number == HONEST);
            }
            // Each outcome is counted once, unless the controller was stopped right behind it.
            let count = |wanted: &dyn Fn(&Outcome) -> bool| {
                it.outcomes.iter().filter(|outcome| wanted(outcome)).count()
            };
            assert!(count(&|it| matches!(it, Outcome::Issued(_))) <= HONEST);
            assert!(count(&|it| matches!(it, Outcome::Denied(..))) <= 1);
            assert!(it.events.len() <= 1);
        });
    }
}
