use std::time::Duration;

use super::*;
use crate::{
    model::{Kind, Node, ObjectName, fixture},
    source::{Overlay, Store, store::SyncPhase},
};

const AT: Duration = Duration::ZERO;

struct MergeFixture {
    merged: MergedObjects,
    store: Store,
    overlay: Overlay,
    nodes: BTreeMap<ObjectName, Arc<Node>>,
}

fn id(name: &str) -> ObjectId {
    ObjectId {
        kind: Kind::Node,
        name: ObjectName::new("", name),
    }
}

/// Returns a Node whose `version` label holds the given version.
fn node(name: &str, version: &str) -> ItemContent {
    ItemContent::Object(Object::Node(Arc::new(Node {
        labels: BTreeMap::from([("version".to_owned(), version.to_owned())]),
        ..fixture::node(name)
    })))
}

fn bad(name: Option<&str>) -> ItemContent {
    ItemContent::Invalid {
        id: name.map(id),
        field: None,
        reason: "is bad".to_owned(),
        ignored: false,
    }
}

impl MergeFixture {
    fn new() -> Self {
        let mut store = Store::default();
        let overlay = store.overlay();
        overlay.edit(AT).set_phase(SyncPhase::Complete);
        Self {
            merged: MergedObjects::default(),
            store,
            overlay,
            nodes: BTreeMap::new(),
        }
    }

    fn file(&mut self, path: &str, content: impl IntoIterator<Item = ItemContent>) {
        let parsed = (1..).zip(content).map(|(document, content)| ParsedItem {
            document,
            line: document * 10,
            content,
        });
        let path = Arc::from(Path::new(path));
        self.merged
            .replace(&path, parsed.collect(), &mut self.overlay.edit(AT));
    }

    fn remove(&mut self, path: &str) {
        self.merged
            .remove(&Arc::from(Path::new(path)), &mut self.overlay.edit(AT));
    }

    /// Returns the names and versions of the Nodes in use.
    fn nodes(&mut self) -> Vec<String> {
        let update = self.store.take_update();
        for (name, node) in update.into_iter().flat_map(|update| update.nodes) {
            match node {
                Some(node) => self.nodes.insert(name, node),
                None => self.nodes.remove(&name),
            };
        }
        let describe = |node: &Arc<Node>| format!("{} {}", node.name, node.labels["version"]);
        self.nodes.values().map(describe).collect()
    }

    fn problems(&self) -> Vec<String> {
        self.merged
            .problems()
            .map(|problem| problem.to_string())
            .collect()
    }
}

#[test]
fn an_invalid_object_keeps_its_last_valid_version_and_the_others_apply() {
    let mut fixture = MergeFixture::new();
    fixture.file("f", [node("a", "1"), node("b", "1"), node("c", "1")]);

    fixture.file("f", [bad(Some("a")), node("b", "2")]);

    assert_eq!(fixture.nodes(), ["a 1", "b 2"]);
    assert_eq!(fixture.problems(), ["f:10: document 1: Node a: is bad"]);
    fixture.file("f", [node("a", "3")]);
    assert_eq!(fixture.nodes(), ["a 3"]);
    assert_eq!(fixture.problems(), [] as [&str; 0]);
}

#[test]
fn the_last_valid_version_stays_after_several_invalid_ones() {
    let mut fixture = MergeFixture::new();
    fixture.file("f", [node("a", "1")]);

    fixture.file("f", [bad(Some("a"))]);
    fixture.file("f", [bad(None)]);
    fixture.file("f", [bad(Some("a"))]);

    assert_eq!(fixture.nodes(), ["a 1"]);
    fixture.file("f", []);
    assert_eq!(fixture.nodes(), [] as [&str; 0]);
}

#[test]
fn an_invalid_document_without_a_name_keeps_all_objects_that_are_not_defined_again() {
    let mut fixture = MergeFixture::new();
    fixture.file("f", [node("a", "1"), node("b", "1"), node("c", "1")]);

    fixture.file(
        "f",
        [node("b", "2"), bad(None), ItemContent::Skipped(id("c"))],
    );

    assert_eq!(fixture.nodes(), ["a 1", "b 2"]);
    fixture.file("f", [node("b", "2")]);
    assert_eq!(fixture.nodes(), ["b 2"]);
}

#[test]
fn an_object_that_is_no_longer_served_is_removed() {
    let mut fixture = MergeFixture::new();
    fixture.file("f", [node("a", "1")]);

    fixture.file("f", [ItemContent::Skipped(id("a"))]);

    assert_eq!(fixture.nodes(), [] as [&str; 0]);
    assert_eq!(fixture.problems(), [] as [&str; 0]);
}

#[test]
fn the_second_definition_within_a_file_is_refused_with_the_document_of_the_first() {
    let mut fixture = MergeFixture::new();

    fixture.file("f", [node("a", "1"), node("b", "1"), node("a", "2")]);

    assert_eq!(fixture.nodes(), ["a 1", "b 1"]);
    let problem = "f:30: document 3: Node a: is already defined in document 1 of this file; remove \
                   one of them";
    assert_eq!(fixture.problems(), [problem]);
}

#[test]
fn the_first_of_several_files_by_name_has_precedence() {
    let mut fixture = MergeFixture::new();
    fixture.file("b", [node("a", "b")]);
    fixture.file("c", [node("a", "c")]);
    fixture.file("a", [node("other", "a"), node("a", "a")]);

    assert_eq!(fixture.nodes(), ["a a", "other a"]);
    assert_eq!(
        fixture.problems(),
        [
            "b:10: document 1: Node a: is already defined in a, which has precedence; remove one of them",
            "c:10: document 1: Node a: is already defined in a, which has precedence; remove one of them",
        ]
    );
    fixture.file("a", [node("other", "a")]);
    assert_eq!(fixture.nodes(), ["a b", "other a"]);
    assert_eq!(fixture.problems().len(), 1);
    fixture.remove("b");
    assert_eq!(fixture.nodes(), ["a c", "other a"]);
    assert_eq!(fixture.problems(), [] as [&str; 0]);
    fixture.remove("c");
    assert_eq!(fixture.nodes(), ["other a"]);
}

#[test]
fn unsupported_kinds_are_reported_once_per_file() {
    let mut fixture = MergeFixture::new();
    let pod = || ItemContent::Unknown("v1 Pod".to_owned());

    fixture.file("f", [pod(), pod(), node("a", "1")]);

    let unknown: Vec<_> = fixture.merged.unknown().collect();
    let named = UnknownKind {
        file: "f".to_owned(),
        kind: "v1 Pod".to_owned(),
    };
    assert_eq!(unknown, [named]);
    assert_eq!(fixture.nodes(), ["a 1"]);
}
