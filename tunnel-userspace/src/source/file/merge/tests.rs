use std::time::Duration;

use super::*;
use crate::{
    model::{Kind, Node, ObjectName, fixture},
    source::{Overlay, Store, store::Phase},
};

const AT: Duration = Duration::ZERO;

struct Case {
    merged: Merged,
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

/// Returns a Node with a label that distinguishes its versions.
fn node(name: &str, version: &str) -> Content {
    Content::Object(Object::Node(Arc::new(Node {
        labels: BTreeMap::from([("version".to_owned(), version.to_owned())]),
        ..fixture::node(name)
    })))
}

fn bad(name: Option<&str>) -> Content {
    Content::Invalid {
        id: name.map(id),
        field: None,
        reason: "is bad".to_owned(),
        ignored: false,
    }
}

impl Case {
    fn new() -> Self {
        let mut store = Store::default();
        let overlay = store.overlay();
        overlay.edit(AT).set_phase(Phase::Whole);
        Self {
            merged: Merged::default(),
            store,
            overlay,
            nodes: BTreeMap::new(),
        }
    }

    fn file(&mut self, path: &str, content: impl IntoIterator<Item = Content>) {
        let parsed = (1..).zip(content).map(|(document, content)| Parsed {
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

    /// Returns the Nodes in use, each with its version.
    fn nodes(&mut self) -> Vec<String> {
        let update = self.store.take_update();
        for (name, node) in update.into_iter().flat_map(|update| update.nodes) {
            match node {
                Some(node) => self.nodes.insert(name, node),
                None => self.nodes.remove(&name),
            };
        }
        let word = |node: &Arc<Node>| format!("{} {}", node.name, node.labels["version"]);
        self.nodes.values().map(word).collect()
    }

    fn problems(&self) -> Vec<String> {
        self.merged
            .problems()
            .map(|problem| problem.to_string())
            .collect()
    }
}

#[test]
fn a_bad_object_keeps_its_last_good_version_and_the_rest_applies() {
    let mut case = Case::new();
    case.file("f", [node("a", "1"), node("b", "1"), node("c", "1")]);

    case.file("f", [bad(Some("a")), node("b", "2")]);

    assert_eq!(case.nodes(), ["a 1", "b 2"]);
    assert_eq!(case.problems(), ["f:10: document 1: Node a: is bad"]);
    case.file("f", [node("a", "3")]);
    assert_eq!(case.nodes(), ["a 3"]);
    assert_eq!(case.problems(), [] as [&str; 0]);
}

#[test]
fn the_last_good_version_outlives_several_bad_ones() {
    let mut case = Case::new();
    case.file("f", [node("a", "1")]);

    case.file("f", [bad(Some("a"))]);
    case.file("f", [bad(None)]);
    case.file("f", [bad(Some("a"))]);

    assert_eq!(case.nodes(), ["a 1"]);
    case.file("f", []);
    assert_eq!(case.nodes(), [] as [&str; 0]);
}

#[test]
fn a_document_that_could_be_any_object_keeps_all_that_are_not_said_anew() {
    let mut case = Case::new();
    case.file("f", [node("a", "1"), node("b", "1"), node("c", "1")]);

    case.file("f", [node("b", "2"), bad(None), Content::Skipped(id("c"))]);

    assert_eq!(case.nodes(), ["a 1", "b 2"]);
    case.file("f", [node("b", "2")]);
    assert_eq!(case.nodes(), ["b 2"]);
}

#[test]
fn an_object_that_is_skipped_takes_back_what_was_served() {
    let mut case = Case::new();
    case.file("f", [node("a", "1")]);

    case.file("f", [Content::Skipped(id("a"))]);

    assert_eq!(case.nodes(), [] as [&str; 0]);
    assert_eq!(case.problems(), [] as [&str; 0]);
}

#[test]
fn the_second_description_within_a_file_is_refused_by_name_of_the_first() {
    let mut case = Case::new();

    case.file("f", [node("a", "1"), node("b", "1"), node("a", "2")]);

    assert_eq!(case.nodes(), ["a 1", "b 1"]);
    let problem = "f:30: document 3: Node a: is already defined in document 1 of this file; remove \
                   one of them";
    assert_eq!(case.problems(), [problem]);
}

#[test]
fn of_two_files_the_first_by_name_counts_until_it_goes() {
    let mut case = Case::new();
    case.file("b", [node("a", "b")]);
    case.file("c", [node("a", "c")]);
    case.file("a", [node("other", "a"), node("a", "a")]);

    assert_eq!(case.nodes(), ["a a", "other a"]);
    assert_eq!(
        case.problems(),
        [
            "b:10: document 1: Node a: is already defined in a, which has precedence; remove one of them",
            "c:10: document 1: Node a: is already defined in a, which has precedence; remove one of them",
        ]
    );
    case.file("a", [node("other", "a")]);
    assert_eq!(case.nodes(), ["a b", "other a"]);
    assert_eq!(case.problems().len(), 1);
    case.remove("b");
    assert_eq!(case.nodes(), ["a c", "other a"]);
    assert_eq!(case.problems(), [] as [&str; 0]);
    case.remove("c");
    assert_eq!(case.nodes(), ["other a"]);
}

#[test]
fn kinds_that_are_left_alone_are_named_once_a_file() {
    let mut case = Case::new();
    let pod = || Content::Unknown("v1 Pod".to_owned());

    case.file("f", [pod(), pod(), node("a", "1")]);

    let unknown: Vec<_> = case.merged.unknown().collect();
    let named = UnknownKind {
        file: "f".to_owned(),
        kind: "v1 Pod".to_owned(),
    };
    assert_eq!(unknown, [named]);
    assert_eq!(case.nodes(), ["a 1"]);
}
