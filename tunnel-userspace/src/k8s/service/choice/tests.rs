use super::*;

/// What the annotations of a Service say, and what of them is left out.
fn read<T>(
    annotations: &[(&str, &str)],
    reader: fn(&ObjectMeta, &mut Vec<Invalid>) -> T,
) -> (T, Vec<String>) {
    let owned = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
    let metadata = ObjectMeta {
        annotations: Some(annotations.iter().map(owned).collect()),
        ..ObjectMeta::default()
    };
    let mut ignored = Vec::new();
    let read = reader(&metadata, &mut ignored);
    (read, ignored.iter().map(ToString::to_string).collect())
}

#[test]
fn algorithms_are_known_by_their_names_and_by_those_of_ipvs() {
    for (name, wanted) in [
        ("random", Algorithm::Random),
        ("weighted", Algorithm::Random),
        ("round-robin", Algorithm::RoundRobin),
        ("rr", Algorithm::RoundRobin),
        ("wrr", Algorithm::RoundRobin),
        ("source-hash", Algorithm::SourceHash),
        ("sh", Algorithm::SourceHash),
        ("destination-hash", Algorithm::DestinationHash),
        ("dh", Algorithm::DestinationHash),
        ("maglev", Algorithm::Maglev),
        (" mh ", Algorithm::Maglev),
        ("least-conn", Algorithm::LeastConn),
        ("lc", Algorithm::LeastConn),
        ("wlc", Algorithm::LeastConn),
        ("sed", Algorithm::LeastConn),
        ("nq", Algorithm::LeastConn),
    ] {
        let (found, ignored) = read(&[("culvert.dev/algorithm", name)], algorithm);
        assert_eq!(found, Some(wanted), "{name}");
        assert!(ignored.is_empty());
    }
    let (found, ignored) = read(&[("culvert.dev/algorithm", "lblc")], algorithm);
    assert_eq!(found, None);
    assert_eq!(
        ignored,
        [
            "metadata.annotations[culvert.dev/algorithm]: \"lblc\" is not random, weighted, \
             round-robin, source-hash, destination-hash, maglev or least-conn, nor their name in IPVS"
        ]
    );
}

#[test]
fn weights_are_those_of_pods_then_of_zones_then_of_the_others() {
    let text = "web-0=3, zone:north = 2,,*=0";
    let (found, ignored) = read(&[("culvert.dev/weights", text)], weights);
    let found = found.expect("weights");

    assert!(ignored.is_empty());
    assert_eq!(found.of(Some("web-0"), Some("north")), 3);
    assert_eq!(found.of(Some("web-1"), Some("north")), 2);
    assert_eq!(found.of(Some("web-1"), Some("south")), 0);
    assert_eq!(found.of(None, None), 0);
}

#[test]
fn an_endpoint_that_nothing_is_said_of_has_a_weight_of_one() {
    let (found, _) = read(&[("culvert.dev/weights", "web-0=3")], weights);

    assert_eq!(found.expect("weights").of(Some("web-1"), Some("north")), 1);
    assert_eq!(read(&[("culvert.dev/weights", " ")], weights).0, None);
    assert_eq!(read(&[], weights).0, None);
}

#[test]
fn a_weight_that_cant_be_read_is_left_out_and_named() {
    let text = "web-0=101, web-1=-1, web-2, =4, web-3=100";
    let (found, ignored) = read(&[("culvert.dev/weights", text)], weights);
    let found = found.expect("weights");

    assert_eq!(found.of(Some("web-0"), None), 1);
    assert_eq!(found.of(Some("web-3"), None), 100);
    let field = "metadata.annotations[culvert.dev/weights]";
    let told = |entry| {
        format!("{field}: {entry:?} is not of the form <pod>=<0 to 100>, zone:<zone>=… or *=…")
    };
    assert_eq!(ignored, ["web-0=101", "web-1=-1", "web-2", "=4"].map(told));
}

#[test]
fn sockets_translate_a_service_unless_it_says_otherwise() {
    let read = |text| read(&[("culvert.dev/sockets", text)], is_not_for_sockets);

    assert_eq!(read("leave-alone"), (true, vec![]));
    assert_eq!(read("translate"), (false, vec![]));
    let (found, ignored) = read("off");
    assert!(!found);
    assert_eq!(
        ignored,
        ["metadata.annotations[culvert.dev/sockets]: \"off\" is not translate or leave-alone"]
    );
}

#[test]
fn topology_keys_are_those_of_openyurt_and_count_as_a_whole() {
    let read = |text| read(&[("openyurt.io/topologyKeys", text)], keep_to);

    for (text, wanted) in [
        ("kubernetes.io/hostname", Some(KeepTo::Node)),
        ("openyurt.io/nodepool", Some(KeepTo::Pool)),
        ("kubernetes.io/zone", Some(KeepTo::Pool)),
        ("", None),
    ] {
        assert_eq!(read(text), (wanted, vec![]), "{text}");
    }
    for text in [
        "*",
        "Kubernetes.io/hostname",
        " kubernetes.io/zone",
        "kubernetes.io/hostname,openyurt.io/nodepool",
        "topology.kubernetes.io/zone",
    ] {
        let (found, ignored) = read(text);
        assert_eq!(found, None, "{text}");
        let told = format!(
            "metadata.annotations[openyurt.io/topologyKeys]: {text:?} is not \
             kubernetes.io/hostname, openyurt.io/nodepool or kubernetes.io/zone"
        );
        assert_eq!(ignored, [told]);
    }
}
