use proptest::prelude::*;

use super::*;

const WEB: &str = "
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.10
  ports:
  - port: 80
";
const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: edge-1}\n";

fn parse(text: &str) -> Vec<ParsedItem> {
    parse_yaml(text, &ParseCache::default()).0
}

/// Describes each item by its document number, its line, and its object or error.
fn describe(parsed: &[ParsedItem]) -> Vec<String> {
    let word = |one: &ParsedItem| {
        let content = match &one.content {
            ItemContent::Object(object) => object.id().to_string(),
            ItemContent::Skipped(id) => format!("skipped {id}"),
            ItemContent::Unknown(kind) => format!("unknown {kind}"),
            ItemContent::Invalid {
                id,
                field,
                reason,
                ignored,
            } => {
                let what = if *ignored { "ignored" } else { "refused" };
                let id = id.as_ref().map(ToString::to_string);
                let parts = [Some(what.to_owned()), id, field.clone()].into_iter();
                let parts: Vec<String> = parts.flatten().chain([reason.clone()]).collect();
                parts.join(" ")
            }
        };
        format!("{}:{} {content}", one.document, one.line)
    };
    parsed.iter().map(word).collect()
}

/// Asserts that there is one item per expected string, and that each item's description begins with its
/// string.
fn expect_descriptions(parsed: &[ParsedItem], expected: &[&str]) {
    let found = describe(parsed);
    let mut pairs = found.iter().zip(expected);
    let is_so = found.len() == expected.len() && pairs.all(|(word, start)| word.starts_with(start));
    assert!(is_so, "{found:#?}");
}

#[test]
fn an_invalid_document_is_reported_with_its_position_and_the_others_are_parsed() {
    let file = format!("{WEB}---\nkind: [\n--- # the node\n{NODE}---\na: 1\na: 2\n");

    let expected = [
        "1:2 Service default/web",
        "2:10 refused is not valid YAML: ",
        "3:12 Node edge-1",
        "4:17 refused is not valid YAML: duplicate",
    ];
    expect_descriptions(&parse(&file), &expected);
}

#[test]
fn an_invalid_item_of_a_list_is_refused_with_its_index() {
    let file = "
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a}}
- apiVersion: v1
  kind: Service
  metadata: {name: b}
  spec: {clusterIP: 10.96.0.1, ports: [{port: 0}]}
- 7
- {apiVersion: v1, kind: Secret}
";
    assert_eq!(
        describe(&parse(file)),
        [
            "1:2 Node a",
            "1:2 refused Service default/b items[1].spec.ports[0].port 0 is not a port from 1 to 65535",
            "1:2 refused items[2] is a number, but must be an object",
            "1:2 unknown v1 Secret",
        ]
    );
}

#[test]
fn json_values_are_parsed_up_to_the_first_syntax_error() {
    let node = |name: &str| {
        format!(r#"{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"{name}"}}}}"#)
    };
    let file = format!("{}\n\n{} 3\n{{\n", node("a"), node("b"));

    let expected = [
        "1:1 Node a",
        "2:3 Node b",
        "3:3 refused is a number, but must be an object",
        "4:5 refused is not valid JSON: EOF",
    ];
    expect_descriptions(&parse_json(&file), &expected);
    assert_eq!(parse_json(" \n "), []);
}

#[test]
fn parallel_parsing_keeps_the_order_of_items() {
    let yaml_of = |i| format!("---\napiVersion: v1\nkind: Node\nmetadata: {{name: edge-{i}}}\n");
    let json_of = |i| match i {
        150 => r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":7}}"#.to_owned(),
        _ => format!(r#"{{"apiVersion":"v1","kind":"Node","metadata":{{"name":"edge-{i}"}}}}"#),
    };
    let yaml_file: String = (0..200).map(yaml_of).collect();
    let items: Vec<_> = (0..200).map(json_of).collect();
    let json_file = format!(
        r#"{{"kind":"List","apiVersion":"v1","items":[{}]}}"#,
        items.join(",")
    );

    let (from_yaml, from_json) = (
        describe(&parse(&yaml_file)),
        describe(&parse_json(&json_file)),
    );

    for i in 0..200 {
        let (document, line) = (i + 1, 4 * i + 2);
        assert_eq!(from_yaml[i], format!("{document}:{line} Node edge-{i}"));
        let wanted = match i {
            150 => {
                "1:1 refused items[150].metadata.name is a number, but must be a string".to_owned()
            }
            _ => format!("1:1 Node edge-{i}"),
        };
        assert_eq!(from_json[i], wanted);
    }
}

#[test]
fn null_documents_are_skipped() {
    assert_eq!(parse("---\nnull\n---\n~\n"), []);
}

#[test]
fn yaml_scalars_have_the_same_types_as_in_kubernetes() {
    let config = |value: &str| {
        let head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {key: ";
        describe(&parse(&format!("{head}{value}}}\n"))).remove(0)
    };

    for (value, wanted) in [
        ("'80'", "1:1 ConfigMap default/a"),
        ("text", "1:1 ConfigMap default/a"),
        ("80", "data.key is the integer 80"),
        ("true", "data.key is the boolean"),
        ("1.5", "data.key is the number"),
    ] {
        assert!(config(value).contains(wanted), "{}", config(value));
    }
}

#[test]
fn too_deep_nesting_and_too_large_expansions_are_refused() {
    let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
    assert!(describe(&parse(&format!("a: {deep}\n")))[0].contains("refused is not valid YAML"));
    assert!(describe(&parse_json(&deep))[0].contains("refused is not valid JSON"));
    // A "billion laughs" attack with nested aliases.
    let mut file = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for i in 1..9 {
        let last = format!("*a{}", i - 1);
        file.push_str(&format!("a{i}: &a{i} [{}]\n", vec![last; 10].join(", ")));
    }

    assert!(describe(&parse(&file))[0].contains("refused is not valid YAML"));
}

#[test]
fn a_long_list_is_parsed_completely() {
    let items =
        "- {apiVersion: v1, kind: Node, metadata: {name: a, labels: {a: b}}}\n".repeat(30_000);
    let file = format!("kind: List\nitems:\n{items}");

    assert_eq!(parse(&file).len(), 30_000);
}

#[test]
fn an_unchanged_document_is_not_parsed_again_but_gets_its_new_line() {
    let (_, cache) = parse_yaml(&format!("{WEB}---\n{NODE}"), &ParseCache::default());

    let (parsed, next) = parse_yaml(&format!("{NODE}---\n{WEB}---\n{NODE}"), &cache);

    assert_eq!(
        describe(&parsed),
        [
            "1:1 Node edge-1",
            "2:6 Service default/web",
            "3:14 Node edge-1"
        ]
    );
    assert_eq!(next.documents.len(), 3);
    let is_kept = |new: &&DocumentItems| cache.documents.values().any(|old| Arc::ptr_eq(old, new));
    assert_eq!(next.documents.values().filter(is_kept).count(), 1);
}

#[test]
fn a_parse_with_and_without_cache_has_the_same_result() {
    let files = [
        format!("{WEB}---\n{NODE}"),
        format!("{NODE}---\nkind: [\n---\n{WEB}"),
    ];
    let mut cache = ParseCache::default();
    for file in files.iter().cycle().take(6) {
        let (parsed, next) = parse_yaml(file, &cache);
        assert_eq!(parsed, parse(file));
        cache = next;
    }
}

proptest! {
    #[test]
    fn text_similar_to_a_manifest_never_panics(
        text in "(kind: |apiVersion: |metadata: |name: |v1|Service|List|items:|- |  |\n|\n---\n|[\\[\\]{}:,&*!|>'\"%@`#?-]|\\PC|null|<<: |~|\t){0,40}"
    ) {
        parse(&text);
        parse_json(&text);
    }

    #[test]
    fn a_manifest_with_a_broken_byte_never_panics(at in 0..WEB.len(), byte in 0_u8..128) {
        let mut bytes = WEB.as_bytes().to_vec();
        bytes[at] = byte;
        parse(std::str::from_utf8(&bytes).expect("ASCII"));
    }
}

#[test]
fn an_ignored_field_is_reported_along_with_its_object() {
    let annotated = WEB.replace(
        "{name: web}",
        "{name: web, annotations: {culvert.dev/algorithm: fastest}}",
    );
    assert_ne!(annotated, WEB);

    assert_eq!(
        describe(&parse(&annotated)),
        [
            "1:2 Service default/web",
            "1:2 ignored Service default/web metadata.annotations[culvert.dev/algorithm] \
             \"fastest\" is not random, weighted, round-robin, source-hash, destination-hash, \
             maglev, least-conn or an IPVS scheduler (rr, wrr, sh, dh, mh, lc, wlc, sed, nq)",
        ]
    );
}
