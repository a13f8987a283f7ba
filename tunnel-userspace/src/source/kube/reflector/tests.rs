use std::{sync::Arc, time::Duration};

use super::*;
use crate::{
    k8s::{self, FieldError},
    model::{Service, fixture},
    source::Store,
};

const AT: Duration = Duration::from_secs(1);

fn parsed(object: Object) -> ParsedObject {
    ParsedObject {
        object,
        ignored: Vec::new(),
    }
}

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).expect("a time")
}

fn id(kind: Kind, name: &str) -> ObjectId {
    ObjectId {
        kind,
        name: ObjectName::new("shop", name),
    }
}

fn service(name: &str) -> Object {
    Object::Service(Arc::new(Service::named(ObjectName::new("shop", name))))
}

fn received(id: ObjectId, object: Result<Option<Object>, FieldError>) -> Box<ReceivedObject> {
    Box::new(ReceivedObject {
        id,
        version: "1".to_owned(),
        uid: Some(Arc::from("1-2-3")),
        service: None,
        object: object.map(|object| object.map(parsed)),
    })
}

fn valid(name: &str) -> Box<ReceivedObject> {
    received(id(Kind::Service, name), Ok(Some(service(name))))
}

fn missing(field: &str) -> FieldError {
    FieldError {
        field: field.to_owned(),
        kind: k8s::FieldErrorKind::Missing,
    }
}

fn invalid(name: &str) -> Box<ReceivedObject> {
    received(id(Kind::Service, name), Err(missing("spec.ports")))
}

/// A reflector for some kinds, and the store and overlay that it writes to.
struct ReflectorFixture {
    reflector: Reflector,
    store: Store,
    overlay: Overlay,
}

impl ReflectorFixture {
    fn new() -> Self {
        Self::of([Kind::Service, Kind::Node], NodeFilter::default())
    }

    fn of(kinds: impl IntoIterator<Item = Kind>, nodes: NodeFilter) -> Self {
        let mut store = Store::default();
        let overlay = store.overlay();
        Self {
            reflector: Reflector::new(kinds, nodes),
            store,
            overlay,
        }
    }

    fn apply(&mut self, kind: Kind, change: Change) {
        let mut edit = self.overlay.edit(AT);
        let event = KindEvent {
            kind,
            at: AT,
            change,
        };
        self.reflector.apply(event, now(), &mut edit);
    }

    fn list(&mut self, kind: Kind, objects: impl IntoIterator<Item = Box<ReceivedObject>>) {
        self.apply(kind, Change::ListStarted);
        for object in objects {
            self.apply(kind, Change::Listed(object));
        }
        self.apply(kind, Change::ListCompleted);
    }

    /// Makes the reflector use a snapshot that contains the given Services.
    fn use_snapshot(&mut self, names: &[&str]) {
        let snapshot = Snapshot {
            written: now(),
            objects: names.iter().map(|name| service(name)).collect(),
        };
        let edit = &mut self.overlay.edit(AT);
        self.reflector.use_snapshot(Some(snapshot), edit);
    }

    fn names(&self) -> Vec<String> {
        let objects = self.overlay.objects().into_iter();
        objects
            .map(|object| object.name().name.to_string())
            .collect()
    }

    fn report(&self) -> SourceReport {
        self.reflector.report(String::new(), &self.overlay)
    }

    fn is_complete(&mut self) -> Option<bool> {
        self.store.take_update().map(|update| update.complete)
    }
}

#[test]
fn nodes_are_current_unless_requests_fail_or_a_node_is_invalid() {
    let mut fixture = ReflectorFixture::new();
    let nodes = fixture.store.nodes();
    let is_current = || nodes.borrow().is_current;
    let node = |object| received(id(Kind::Node, "edge-7"), object);
    let valid = || Ok(Some(Object::Node(Arc::new(fixture::node("edge-7")))));
    fixture.apply(Kind::Node, Change::ListStarted);
    fixture.apply(Kind::Node, Change::Listed(node(valid())));
    assert!(!is_current(), "the list is incomplete");
    fixture.apply(Kind::Node, Change::ListCompleted);
    assert!(is_current(), "the Services do not matter");

    fixture.apply(Kind::Node, Change::RequestFailed("timeout".to_owned()));
    assert!(!is_current());
    fixture.apply(Kind::Node, Change::RequestSucceeded);
    assert!(is_current());
    fixture.apply(Kind::Service, Change::RequestFailed("timeout".to_owned()));
    fixture.apply(Kind::Service, Change::Updated(invalid("web")));
    assert!(is_current(), "the Services do not matter");

    fixture.apply(Kind::Node, Change::Updated(node(Err(missing("spec")))));
    assert!(!is_current());
    fixture.apply(Kind::Node, Change::Updated(node(valid())));
    assert!(is_current());
}

#[test]
fn a_complete_list_is_applied_and_deletes_missing_objects() {
    let mut fixture = ReflectorFixture::new();
    fixture.list(Kind::Service, [valid("a"), valid("b")]);
    assert!(!fixture.reflector.is_synced());
    fixture.list(Kind::Node, []);
    assert!(fixture.reflector.is_synced());
    assert_eq!(fixture.is_complete(), Some(true));

    fixture.apply(Kind::Service, Change::ListStarted);
    fixture.apply(Kind::Service, Change::Listed(valid("c")));
    assert_eq!(fixture.names(), ["a", "b"]);
    fixture.apply(Kind::Service, Change::ListCompleted);

    assert_eq!(fixture.names(), ["c"]);
}

#[test]
fn an_object_with_an_ignored_field_is_used_and_reported() {
    let mut fixture = ReflectorFixture::new();
    let mut object = valid("a");
    if let Ok(Some(parsed)) = &mut object.object {
        parsed.ignored.push(missing("metadata.annotations[x]"));
    }
    fixture.list(Kind::Service, [object]);
    fixture.list(Kind::Node, []);

    assert_eq!(fixture.names(), ["a"]);
    assert_eq!(fixture.is_complete(), Some(true));
    let problems = fixture.report().problems;
    assert!(problems.len() == 1 && problems[0].ignored, "{problems:?}");
    let warnings = fixture.reflector.warnings(&fixture.overlay);
    assert_eq!(warnings[0].reason, Reason::FieldIgnored);
    assert_eq!(warnings[0].uid.as_deref(), Some("1-2-3"));

    fixture.apply(Kind::Service, Change::Updated(valid("a")));
    assert!(fixture.reflector.warnings(&fixture.overlay).is_empty());
}

#[test]
fn an_error_in_a_slice_is_reported_on_its_service() {
    let kinds = [Kind::Service, Kind::EndpointSlice];
    let mut fixture = ReflectorFixture::of(kinds, NodeFilter::default());
    let mut slice = invalid("web-1");
    slice.id.kind = Kind::EndpointSlice;
    slice.service = Some(Arc::from("web"));
    fixture.list(Kind::EndpointSlice, [slice]);
    fixture.list(Kind::Service, []);
    assert_eq!(
        fixture.reflector.warnings(&fixture.overlay)[0].regarding,
        id(Kind::EndpointSlice, "web-1")
    );

    fixture.apply(Kind::Service, Change::Updated(valid("web")));

    let warning = fixture.reflector.warnings(&fixture.overlay).remove(0);
    assert_eq!(warning.regarding, id(Kind::Service, "web"));
    assert_eq!(warning.reason, Reason::ObjectRejected);
    assert_eq!(
        warning.note,
        "EndpointSlice shop/web-1: spec.ports: is required"
    );
}

#[test]
fn the_first_list_of_services_waits_for_that_of_slices() {
    let kinds = [Kind::Service, Kind::EndpointSlice, Kind::ServiceCidr];
    let mut fixture = ReflectorFixture::of(kinds, NodeFilter::default());
    fixture.list(Kind::Service, [valid("a"), valid("b")]);
    fixture.apply(Kind::Service, Change::Updated(valid("c")));
    fixture.apply(Kind::Service, Change::Deleted(valid("b")));
    assert!(fixture.names().is_empty() && !fixture.reflector.is_synced());

    fixture.list(Kind::EndpointSlice, []);

    assert_eq!(fixture.names(), ["a", "c"]);
    // The reflector does not wait for the list of ServiceCIDRs.
    assert!(fixture.reflector.is_synced());
    fixture.list(Kind::Service, [valid("a")]);
    assert_eq!(fixture.names(), ["a"]);
}

#[test]
fn a_successful_request_clears_the_error_even_without_changes() {
    let mut fixture = ReflectorFixture::new();
    let error = |fixture: &ReflectorFixture| fixture.report().server?.error;
    fixture.apply(Kind::Node, Change::RequestFailed("reset".to_owned()));
    assert_eq!(error(&fixture).as_deref(), Some("Node: reset"));

    fixture.apply(Kind::Node, Change::RequestSucceeded);

    assert_eq!(error(&fixture), None);
}

#[test]
fn an_interrupted_list_changes_nothing() {
    let mut fixture = ReflectorFixture::new();
    fixture.list(Kind::Service, [valid("a")]);

    fixture.apply(Kind::Service, Change::ListStarted);
    fixture.apply(Kind::Service, Change::RequestFailed("reset".to_owned()));
    fixture.list(Kind::Service, [valid("a"), valid("b")]);

    assert_eq!(fixture.names(), ["a", "b"]);
}

#[test]
fn a_refused_object_keeps_its_last_version_and_the_others_apply() {
    let mut fixture = ReflectorFixture::new();
    fixture.list(Kind::Node, []);
    fixture.list(Kind::Service, [valid("a"), valid("b")]);
    fixture.store.take_update();

    fixture.list(Kind::Service, [invalid("a"), valid("c")]);
    assert_eq!(fixture.names(), ["a", "c"]);
    assert_eq!(fixture.is_complete(), Some(false));
    let report = fixture.report();
    assert_eq!(
        report.problems[0].to_string(),
        "API server: Service shop/a: spec.ports: is required"
    );

    // The problem is resolved once the object is changed or deleted.
    fixture.apply(Kind::Service, Change::Updated(valid("a")));
    assert_eq!(fixture.is_complete(), Some(true));
    fixture.apply(Kind::Service, Change::Updated(invalid("a")));
    fixture.apply(Kind::Service, Change::Deleted(invalid("a")));
    assert_eq!(fixture.names(), ["c"]);
    assert!(fixture.report().problems.is_empty());
}

#[test]
fn a_refused_object_that_is_missing_from_the_next_list_is_deleted() {
    let mut fixture = ReflectorFixture::new();
    fixture.list(Kind::Node, []);
    fixture.list(Kind::Service, [valid("a")]);
    fixture.apply(Kind::Service, Change::Updated(invalid("a")));

    fixture.list(Kind::Service, []);

    assert!(fixture.names().is_empty());
    assert!(fixture.report().problems.is_empty());
}

#[test]
fn an_object_that_is_no_longer_served_is_removed() {
    let mut fixture = ReflectorFixture::new();
    fixture.list(Kind::Service, [valid("a")]);

    let without = received(id(Kind::Service, "a"), Ok(None));
    fixture.apply(Kind::Service, Change::Updated(without));

    assert!(fixture.names().is_empty());
}

#[test]
fn the_snapshot_is_used_until_the_server_responds_and_deletes_nothing() {
    let mut fixture = ReflectorFixture::new();
    fixture.use_snapshot(&["a", "b"]);
    let update = fixture.store.take_update().expect("an update");
    assert!(update.synced && update.stale && !update.complete);
    let stale = fixture.report().server.and_then(|server| server.stale);
    assert_eq!(
        stale.as_deref(),
        Some("using the last known state of 2027-01-15T08:00:00Z")
    );

    fixture.list(Kind::Service, [valid("b"), valid("c")]);
    assert_eq!(fixture.names(), ["b", "c"]);
    fixture.list(Kind::Node, []);

    assert_eq!(fixture.is_complete(), Some(true));
    let stale = fixture.report().server.and_then(|server| server.stale);
    assert_eq!(stale, None);
}

#[test]
fn the_snapshot_does_not_replace_received_lists() {
    let mut fixture = ReflectorFixture::new();
    fixture.list(Kind::Service, [valid("b")]);

    fixture.use_snapshot(&["a"]);

    assert_eq!(fixture.names(), ["b"]);
}

#[test]
fn only_used_labels_of_other_nodes_are_kept() {
    let filter = NodeFilter {
        own: "own".to_owned(),
        labels: BTreeSet::from(["edge".to_owned()]),
    };
    let mut fixture = ReflectorFixture::of([Kind::Node], filter);
    for name in ["own", "other"] {
        let labels = ["edge", "rack"].map(|label| (label.to_owned(), "x".to_owned()));
        let node = Object::Node(Arc::new(Node {
            labels: labels.into(),
            ..fixture::node(name)
        }));
        let received = received(node.id(), Ok(Some(node)));
        fixture.apply(Kind::Node, Change::Updated(received));
    }

    let objects = fixture.overlay.objects();
    let labels = objects.iter().map(|object| {
        let Object::Node(node) = object else {
            panic!("a Node is known");
        };
        let keys: Vec<&str> = node.labels.keys().map(String::as_str).collect();
        format!("{} {}", node.name, keys.join(" "))
    });
    assert_eq!(labels.collect::<Vec<_>>(), ["other edge", "own edge rack"]);
}
