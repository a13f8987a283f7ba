use std::fs;

use super::{
    super::{
        Role,
        tests::{TestCa, assert_has, first_certificate, identity},
    },
    *,
};
use crate::identity::identify_agent;

fn peer(node: &str, serial: &str) -> Peer {
    Peer {
        node: node.into(),
        serial: SerialNumber::parse(serial).expect("a serial number"),
        expires: jiff::Timestamp::UNIX_EPOCH,
        issuer: String::new(),
    }
}

#[test]
fn a_list_has_nodes_and_serial_numbers_one_per_line_with_comments() {
    let text = "# stolen on 2026-11-20\n\n  node edge-7   # the one in the yard\n\
                serial 00:8A:01:F0\nnode edge-8.example\r\nserial 8a01f0";

    let list = DenyList::parse(text.as_bytes()).expect("valid");

    assert_eq!((list.nodes.len(), list.serials.len()), (2, 1));
    let text = |node, serial| {
        let denied = list.entry_of(&peer(node, serial));
        denied.map(|denied| denied.to_string())
    };
    let of_list = "the deny list (tunnel.gateway.denyFile) has";
    assert_eq!(
        text("edge-7", "1").as_deref(),
        Some(&*format!("{of_list} node edge-7"))
    );
    assert_eq!(
        text("edge-1", "8a01f0").as_deref(),
        Some(&*format!(
            "{of_list} the certificate of node edge-1 with the serial number 8a01f0"
        ))
    );
    assert_eq!(text("edge", "8a01"), None);
    assert!(
        DenyList::parse(b"# nothing yet\n")
            .expect("valid")
            .is_empty()
    );
}

#[test]
fn an_invalid_line_is_named() {
    for (text, wanted) in [
        (
            "node a\nnod b",
            "line 2: `nod b` is neither `node NAME` nor `serial DIGITS`",
        ),
        ("node", "line 1: `node` is neither `node NAME` nor"),
        ("node a b", "line 1: `node a b` is neither"),
        ("\nnode A!", "line 2: "),
        (
            "serial xyz",
            "line 1: serial: `xyz` is not a serial number; write the hexadecimal",
        ),
        ("edge-7", "line 1: `edge-7` is neither"),
        ("node \u{1b}[31m", "line 1: "),
    ] {
        let problem = DenyList::parse(text.as_bytes())
            .expect_err(text)
            .to_string();
        assert_has(&problem, wanted);
        assert!(!problem.contains('\u{1b}'), "{problem:?}");
    }
    let problem = DenyList::parse(b"node a\xff").expect_err("not UTF-8");
    assert_has(&problem.to_string(), "not UTF-8");
}

#[test]
fn a_change_takes_effect_once_two_checks_agree_and_the_last_valid_list_stays() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("deny");
    fs::write(&path, "node edge-1\n").expect("written");
    let (mut store, receiver) = DenyListStore::open(path.clone());
    let mut check = || store.handle_check(read(&path));
    let denies = |node: &str| {
        let list = receiver.current().expect("a list");
        list.entry_of(&peer(node, "1")).is_some()
    };
    assert!(denies("edge-1"), "the file is used at once");

    // A reader may see a file that is being written: here, the name `edge-17` is still incomplete.
    fs::write(&path, "node edge-2\nnode edge-1").expect("written");
    check();
    fs::write(&path, "node edge-2\nnode edge-17\n").expect("written");
    check();
    assert!(denies("edge-1") && !denies("edge-2"));
    check();
    assert!(!denies("edge-1") && denies("edge-2") && denies("edge-17"));

    fs::write(&path, "node edge-3\nwhat\n").expect("written");
    check();
    assert_eq!(receiver.state().problem, None, "it may be incomplete");
    check();
    let state = receiver.state();
    assert_eq!((state.nodes, state.certificates), (2, 0));
    let problem = state.problem.expect("a problem");
    let wanted = format!("{}: line 2: `what` is neither", path.display());
    assert_has(&problem, &wanted);
    assert!(denies("edge-2") && !denies("edge-3"));

    fs::remove_file(&path).expect("removed");
    check();
    check();
    let problem = receiver.state().problem.expect("a problem");
    assert_has(&problem, "deny: cannot be read: No such file");
    assert!(denies("edge-2"));

    fs::write(&path, "").expect("written");
    check();
    check();
    assert_eq!(receiver.state(), DenyListState::default());
    assert!(!denies("edge-2"));
}

#[test]
fn a_file_that_has_never_been_valid_gives_no_list() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("deny");
    let (mut store, receiver) = DenyListStore::open(path.clone());
    assert_eq!(receiver.current(), None);
    assert_has(
        &receiver.state().problem.expect("a problem"),
        "cannot be read",
    );

    let too_large = vec![b'#'; usize::try_from(pem_files::MAX_SIZE).expect("small") + 1];
    fs::write(&path, too_large).expect("written");
    for _ in 0..2 {
        store.handle_check(read(&path));
    }
    assert_has(
        &receiver.state().problem.expect("a problem"),
        "is larger than",
    );
    assert_eq!(receiver.current(), None);

    fs::write(&path, "node edge-1").expect("written");
    for _ in 0..2 {
        store.handle_check(read(&path));
    }
    assert_eq!(receiver.state().problem, None);
    assert!(receiver.current().is_some());
}

#[test]
fn the_serial_number_on_the_list_is_the_one_that_is_shown() {
    let test_ca = TestCa::new();
    let files = test_ca.agent("edge-1");
    let views = super::super::ca::read_certificates(&files.cert, test_ca.now).expect("read");
    let agent = identify_agent(&first_certificate(&files.cert)).expect("an agent");

    let list = DenyList::parse(format!("serial {}", views[0].serial).as_bytes()).expect("valid");

    let denied = list.entry_of(&agent).expect("denied");
    assert_eq!(&**denied.node(), "edge-1");
    let own = identity(&test_ca.gateway(), Role::Gateway, test_ca.now);
    let (config, denial) = own.server_with(Arc::new(list)).expect("settings");
    assert!(!Arc::ptr_eq(&config, &own.server) && denial.get().is_none());
    assert!(!config.alpn_protocols.is_empty() && config.send_tls13_tickets == 0);
}
