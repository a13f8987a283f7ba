use std::convert::Infallible;

use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::service_fn;

use super::*;
use crate::model::{Kind, ObjectId, ObjectName};

/// A time longer than the maximum delay before a new warning is sent.
const MAX_DELAY: Duration = Duration::from_secs(12);

/// A fake API server that sends the same response to all requests, and records the Events it receives.
#[derive(Clone)]
struct FakeServer {
    response: watch::Sender<(u16, Value)>,
    received: watch::Sender<Vec<Value>>,
}

impl FakeServer {
    fn new() -> Self {
        Self {
            response: watch::Sender::new((201, json!({"metadata": {}}))),
            received: watch::Sender::default(),
        }
    }

    fn respond_with(&self, code: u16, reason: &str, cause: &str) {
        let status = json!({
            "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "no",
            "details": {"causes": [{"reason": cause}]},
        });
        self.response.send_replace((code, status));
    }

    fn client(&self) -> Client {
        let this = self.clone();
        let answer = move |request: Request<Body>| {
            let this = this.clone();
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect().await.expect("a body");
                let event: Value = serde_json::from_slice(&body.to_bytes()).expect("an Event");
                let event = json!([path, event["reason"], event["note"]]);
                this.received.send_modify(|all| all.push(event));
                let (code, said) = this.response.borrow().clone();
                let said = serde_json::to_vec(&said).expect("JSON");
                let answer = Response::builder().status(code).body(Body::from(said));
                Ok::<_, Infallible>(answer.expect("an answer"))
            }
        };
        Client::new(service_fn(answer), "default")
    }
}

/// Returns a warning that the given Service's frontend already belongs to another Service.
pub(super) fn conflict_warning(name: &str) -> ObjectWarning {
    ObjectWarning {
        regarding: ObjectId::new(Kind::Service, ObjectName::new("shop", name)),
        uid: Some(Arc::from("1-2-3")),
        reason: Reason::FrontendConflict,
        note: "belongs to another".to_owned(),
    }
}

type Ports = BTreeMap<String, String>;

/// A running Event task, with its inputs and a fake API server.
struct RunningTask {
    server: FakeServer,
    warnings: watch::Sender<Arc<[ObjectWarning]>>,
    unbound_ports: watch::Sender<Ports>,
    _drain: watch::Sender<bool>,
}

impl RunningTask {
    fn new() -> Self {
        Self::with(Ports::new())
    }

    /// Starts the task, with `ports` reported as the ports that could not be bound.
    fn with(ports: Ports) -> Self {
        let (unbound_ports, ports) = watch::channel(ports);
        let server = FakeServer::new();
        let (warnings, receiver) = watch::channel(Arc::default());
        let (drain, draining) = watch::channel(false);
        let settings = EventSettings {
            enabled: true,
            burst: 5,
            interval: Duration::from_secs(10),
        };
        let inputs = EventInputs {
            warnings: vec![receiver],
            unbound_ports: ports,
        };
        let (name, client) = ("edge-1".to_owned(), server.client());
        let running = run(name, settings, client, inputs, draining);
        #[expect(
            clippy::disallowed_methods,
            reason = "it ends with the runtime of the test"
        )]
        drop(tokio::spawn(running));
        Self {
            server,
            warnings,
            unbound_ports,
            _drain: drain,
        }
    }

    /// Publishes a warning that the given Service's frontend already belongs to another Service.
    fn publish_conflict(&self, name: &str) {
        self.warnings
            .send_replace(Arc::new([conflict_warning(name)]));
    }

    /// Returns the Events that are received within `seconds` seconds, except for the one that reports the
    /// daemon's start.
    async fn received_events(&self, seconds: u64) -> Vec<Value> {
        let mut events = self.all_received_events(seconds).await;
        events.retain(|event| event[1] != "Starting");
        events
    }

    async fn all_received_events(&self, seconds: u64) -> Vec<Value> {
        sleep(Duration::from_secs(seconds)).await;
        self.server.received.send_replace(Vec::new())
    }
}

const WEB: [&str; 3] = [
    "/apis/events.k8s.io/v1/namespaces/shop/events",
    "FrontendConflict",
    "belongs to another",
];

#[tokio::test(start_paused = true)]
async fn each_warning_is_sent_once() {
    let task = RunningTask::new();
    task.publish_conflict("web");
    let taken = BTreeMap::from([("healthz".to_owned(), "address in use".to_owned())]);
    task.unbound_ports.send_replace(taken);

    let events = task.received_events(MAX_DELAY.as_secs()).await;

    let of_port = json!([
        "/apis/events.k8s.io/v1/namespaces/default/events",
        "PortInUse",
        "healthz: address in use"
    ]);
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(
        events.contains(&json!(WEB)) && events.contains(&of_port),
        "{events:?}"
    );
    assert!(task.received_events(600).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_event_of_a_start_is_sent_once_and_retried_if_it_fails() {
    let task = RunningTask::new();
    task.server.respond_with(503, "ServiceUnavailable", "");
    let start_event = json!([
        "/apis/events.k8s.io/v1/namespaces/default/events",
        "Starting",
        concat!("culvert ", env!("CARGO_PKG_VERSION"), " starts")
    ]);
    assert_eq!(
        task.all_received_events(30).await,
        std::slice::from_ref(&start_event)
    );

    task.server.respond_with(409, "AlreadyExists", "");

    assert_eq!(task.all_received_events(60).await, [start_event]);
    assert!(task.all_received_events(600).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn warnings_from_before_the_start_of_the_task_are_sent() {
    let taken = ("healthz".to_owned(), "in use".to_owned());
    let task = RunningTask::with([taken].into());

    assert_eq!(task.received_events(MAX_DELAY.as_secs()).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_event_is_retried_unless_it_exists_or_can_never_be_created() {
    for (code, reason, cause, is_final) in [
        (409, "AlreadyExists", "", true),
        (422, "Invalid", "", true),
        (403, "Forbidden", "NamespaceTerminating", true),
        (403, "Forbidden", "", false),
        (503, "ServiceUnavailable", "", false),
    ] {
        let task = RunningTask::new();
        task.server.respond_with(code, reason, cause);
        task.publish_conflict("web");
        assert_eq!(
            task.received_events(MAX_DELAY.as_secs()).await,
            [json!(WEB)]
        );
        assert!(task.received_events(30).await.is_empty(), "{reason}");

        task.server.respond_with(409, "AlreadyExists", "");

        let later = if is_final { vec![] } else { vec![json!(WEB)] };
        assert_eq!(task.received_events(60).await, later, "{reason} {cause}");
        assert!(task.received_events(600).await.is_empty(), "{reason}");
    }
}
