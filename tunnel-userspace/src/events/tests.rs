use std::convert::Infallible;

use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::service_fn;

use super::*;
use crate::model::{Kind, ObjectId, ObjectName};

/// Longer than the maximum delay of a new warning.
const SETTLED: Duration = Duration::from_secs(12);

/// A fake API server that sends one response to all requests, and records the received Events.
#[derive(Clone)]
struct Server {
    answer: watch::Sender<(u16, Value)>,
    made: watch::Sender<Vec<Value>>,
}

impl Server {
    fn new() -> Self {
        Self {
            answer: watch::Sender::new((201, json!({"metadata": {}}))),
            made: watch::Sender::default(),
        }
    }

    fn says(&self, code: u16, reason: &str, cause: &str) {
        let status = json!({
            "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "no",
            "details": {"causes": [{"reason": cause}]},
        });
        self.answer.send_replace((code, status));
    }

    fn client(&self) -> Client {
        let this = self.clone();
        let answer = move |request: Request<Body>| {
            let this = this.clone();
            async move {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect().await.expect("a body");
                let event: Value = serde_json::from_slice(&body.to_bytes()).expect("an Event");
                let made = json!([path, event["reason"], event["note"]]);
                this.made.send_modify(|all| all.push(made));
                let (code, said) = this.answer.borrow().clone();
                let said = serde_json::to_vec(&said).expect("JSON");
                let answer = Response::builder().status(code).body(Body::from(said));
                Ok::<_, Infallible>(answer.expect("an answer"))
            }
        };
        Client::new(service_fn(answer), "default")
    }
}

/// Returns a warning that the frontend of this Service belongs to another one.
pub(super) fn claimed(name: &str) -> Concern {
    Concern {
        about: ObjectId::new(Kind::Service, ObjectName::new("shop", name)),
        uid: Some(Arc::from("1-2-3")),
        reason: Reason::FrontendConflict,
        note: "belongs to another".to_owned(),
    }
}

type Ports = BTreeMap<String, String>;

/// A running Event task with its inputs and its API server.
struct Case {
    server: Server,
    concerns: watch::Sender<Arc<[Concern]>>,
    listening: watch::Sender<Ports>,
    _drain: watch::Sender<bool>,
}

impl Case {
    fn new() -> Self {
        Self::with(Ports::new())
    }

    /// Starts the task with these ports that can't be bound.
    fn with(ports: Ports) -> Self {
        let (listening, ports) = watch::channel(ports);
        let server = Server::new();
        let (concerns, following) = watch::channel(Arc::default());
        let (drain, draining) = watch::channel(false);
        let settings = Settings {
            enabled: true,
            burst: 5,
            interval: Duration::from_secs(10),
        };
        let views = Views {
            concerns: vec![following],
            listening: ports,
        };
        let (name, client) = ("edge-1".to_owned(), server.client());
        let running = run(name, settings, client, views, draining);
        #[expect(
            clippy::disallowed_methods,
            reason = "it ends with the runtime of the test"
        )]
        drop(tokio::spawn(running));
        Self {
            server,
            concerns,
            listening,
            _drain: drain,
        }
    }

    /// Publishes the warning that the frontend of this Service belongs to another one.
    fn claimed(&self, name: &str) {
        self.concerns.send_replace(Arc::new([claimed(name)]));
    }

    /// Returns the Events that are sent within this number of seconds, except that of the start.
    async fn told(&self, seconds: u64) -> Vec<Value> {
        let mut told = self.all_told(seconds).await;
        told.retain(|event| event[1] != "Starting");
        told
    }

    async fn all_told(&self, seconds: u64) -> Vec<Value> {
        sleep(Duration::from_secs(seconds)).await;
        self.server.made.send_replace(Vec::new())
    }
}

const WEB: [&str; 3] = [
    "/apis/events.k8s.io/v1/namespaces/shop/events",
    "FrontendConflict",
    "belongs to another",
];

#[tokio::test(start_paused = true)]
async fn what_an_operator_must_act_on_is_told_once() {
    let case = Case::new();
    case.claimed("web");
    let taken = BTreeMap::from([("healthz".to_owned(), "address in use".to_owned())]);
    case.listening.send_replace(taken);

    let told = case.told(SETTLED.as_secs()).await;

    let of_port = json!([
        "/apis/events.k8s.io/v1/namespaces/default/events",
        "PortInUse",
        "healthz: address in use"
    ]);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told.contains(&json!(WEB)) && told.contains(&of_port),
        "{told:?}"
    );
    assert!(case.told(600).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_start_is_told_once_and_later_where_it_can_not_be() {
    let case = Case::new();
    case.server.says(503, "ServiceUnavailable", "");
    let of_start = json!([
        "/apis/events.k8s.io/v1/namespaces/default/events",
        "Starting",
        concat!("culvert ", env!("CARGO_PKG_VERSION"), " starts")
    ]);
    assert_eq!(case.all_told(30).await, std::slice::from_ref(&of_start));

    case.server.says(409, "AlreadyExists", "");

    assert_eq!(case.all_told(60).await, [of_start]);
    assert!(case.all_told(600).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_was_there_before_is_told_too() {
    let taken = ("healthz".to_owned(), "in use".to_owned());
    let case = Case::with([taken].into());

    assert_eq!(case.told(SETTLED.as_secs()).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_told_is_told_later_but_for_what_another_node_told() {
    for (code, reason, cause, is_told) in [
        (409, "AlreadyExists", "", true),
        (422, "Invalid", "", true),
        (403, "Forbidden", "NamespaceTerminating", true),
        (403, "Forbidden", "", false),
        (503, "ServiceUnavailable", "", false),
    ] {
        let case = Case::new();
        case.server.says(code, reason, cause);
        case.claimed("web");
        assert_eq!(case.told(SETTLED.as_secs()).await, [json!(WEB)]);
        assert!(case.told(30).await.is_empty(), "{reason}");

        case.server.says(409, "AlreadyExists", "");

        let later = if is_told { vec![] } else { vec![json!(WEB)] };
        assert_eq!(case.told(60).await, later, "{reason} {cause}");
        assert!(case.told(600).await.is_empty(), "{reason}");
    }
}
