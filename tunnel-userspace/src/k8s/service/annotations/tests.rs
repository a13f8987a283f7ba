use super::*;

type Reader<T> = fn(&ObjectMeta, &mut Vec<FieldError>) -> T;

/// Parses a Service annotation, and asserts that exactly these errors are reported.
#[track_caller]
fn read<T>(reader: Reader<T>, name: &str, text: &str, wrong: &[&str]) -> T {
    let metadata = ObjectMeta {
        annotations: Some([(name.to_owned(), text.to_owned())].into()),
        ..ObjectMeta::default()
    };
    let mut ignored = Vec::new();
    let read = reader(&metadata, &mut ignored);
    let ignored: Vec<_> = ignored.iter().map(ToString::to_string).collect();
    let with_field = |wrong| format!("metadata.annotations[{name}]: {wrong}");
    assert_eq!(
        ignored,
        Vec::from_iter(wrong.iter().map(with_field)),
        "{text}"
    );
    read
}

#[test]
fn algorithms_have_their_own_names_and_those_of_ipvs_schedulers() {
    let read = |text, wrong: &[&str]| read(algorithm, "culvert.dev/algorithm", text, wrong);

    for (names, wanted) in [
        ("random|weighted", Algorithm::Random),
        ("round-robin|rr|wrr", Algorithm::RoundRobin),
        ("source-hash|sh", Algorithm::SourceHash),
        ("destination-hash|dh", Algorithm::DestinationHash),
        ("maglev| mh ", Algorithm::Maglev),
        ("least-conn|lc|wlc|sed|nq", Algorithm::LeastConn),
    ] {
        for name in names.split('|') {
            assert_eq!(read(name, &[]), Some(wanted), "{name}");
        }
    }
    let wrong = "\"lblc\" is not random, weighted, round-robin, source-hash, destination-hash, \
                 maglev, least-conn or an IPVS scheduler (rr, wrr, sh, dh, mh, lc, wlc, sed, nq)";
    assert_eq!(read("lblc", &[wrong]), None);
}

fn read_weights(text: &str, wrong: &[&str]) -> Option<Arc<Weights>> {
    read(weights, "culvert.dev/weights", text, wrong)
}

#[test]
fn the_weight_of_a_pod_precedes_that_of_its_zone_and_the_default_is_one() {
    let weights = read_weights("web-0=3, zone:north = 2,,*=0", &[]).expect("weights");
    assert_eq!(weights.of(Some("web-0"), Some("north")), 3);
    assert_eq!(weights.of(Some("web-1"), Some("north")), 2);
    assert_eq!(weights.of(Some("web-1"), Some("south")), 0);
    assert_eq!(weights.of(None, None), 0);

    let weights = read_weights("web-0=3", &[]).expect("weights");
    assert_eq!(weights.of(Some("web-1"), Some("north")), 1);
    assert_eq!(read_weights(" ", &[]), None);
    let mut ignored = Vec::new();
    assert_eq!(super::weights(&ObjectMeta::default(), &mut ignored), None);
}

#[test]
fn an_invalid_weight_is_ignored_and_reported() {
    let wrong = ["web-0=101", "web-1=-1", "web-2", "=4"].map(|entry| {
        format!("{entry:?} is not POD=WEIGHT, zone:ZONE=WEIGHT or *=WEIGHT, from 0 to 100")
    });
    let wrong = wrong.each_ref().map(String::as_str);
    let text = "web-0=101, web-1=-1, web-2, =4, web-3=100";
    let weights = read_weights(text, &wrong).expect("weights");

    assert_eq!(weights.of(Some("web-0"), None), 1);
    assert_eq!(weights.of(Some("web-3"), None), 100);
}

#[test]
fn socket_translation_is_enabled_unless_the_annotation_disables_it() {
    let read = |text, wrong: &[&str]| {
        read(
            is_socket_translation_disabled,
            "culvert.dev/socket-translation",
            text,
            wrong,
        )
    };

    assert!(read("disabled", &[]));
    assert!(!read("enabled", &[]));
    assert!(!read("off", &["\"off\" is not enabled or disabled"]));
}

#[test]
fn topology_keys_must_be_exactly_one_of_those_of_openyurt() {
    let read = |text, wrong: &[&str]| read(endpoint_scope, "openyurt.io/topologyKeys", text, wrong);

    for (text, wanted) in [
        ("kubernetes.io/hostname", Some(EndpointScope::Node)),
        ("openyurt.io/nodepool", Some(EndpointScope::Pool)),
        ("kubernetes.io/zone", Some(EndpointScope::Pool)),
        ("", None),
    ] {
        assert_eq!(read(text, &[]), wanted, "{text}");
    }
    let known = "kubernetes.io/hostname, openyurt.io/nodepool or kubernetes.io/zone";
    for text in [
        "*",
        "Kubernetes.io/hostname",
        " kubernetes.io/zone",
        "kubernetes.io/hostname,openyurt.io/nodepool",
        "topology.kubernetes.io/zone",
    ] {
        assert_eq!(read(text, &[&format!("{text:?} is not {known}")]), None);
    }
}
