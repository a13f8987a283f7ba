//! Tests for the checks on certificate files, including the error for each kind of invalid file.

use std::{fs, os::unix::fs::symlink};

use rcgen::{
    BasicConstraints, CertificateParams,
    ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth},
    IsCa, KeyPair,
};
use rustls::pki_types::CertificateDer;
use x509_parser::{certificate::X509Certificate, prelude::FromDer as _};

use super::{
    TestCa, assert_has, both_cas, copy, days, error_text, first_certificate, fixed_time, name,
    verified,
};
use crate::identity::{IdentityFiles, Role, certificate::ParsedCertificate, identify_agent};

/// The error for a file that was truncated, or joined with another, in the middle of a line.
const NO_LINE: &str =
    "is damaged: a -----BEGIN or -----END marker is not a complete line of its own";

/// The error for a file that was truncated in the middle of a section.
const NO_END: &str = "is damaged: the last -----BEGIN line has no -----END line";

/// Asserts that an agent's files are rejected with the error `wanted`.
fn assert_refused(files: &IdentityFiles, wanted: &str) {
    assert_eq!(error_text(files, Role::Agent, fixed_time()), wanted);
}

/// Returns a certificate's subject, in its DER encoding.
fn subject(der: &CertificateDer<'_>) -> Vec<u8> {
    let (_, parsed) = X509Certificate::from_der(der).expect("a certificate");
    parsed.subject().as_raw().to_vec()
}

#[test]
fn issued_files_are_valid_for_their_own_role_only() {
    let test_ca = TestCa::at(fixed_time());
    let (gateway, agent) = (test_ca.gateway(), test_ca.agent("edge-1"));

    let good = verified(&agent, Role::Agent, fixed_time()).expect("good");
    assert_eq!(good.name, "edge-1");
    assert_eq!(good.expires, fixed_time() + days(365));
    assert_eq!(good.ca_expires, fixed_time() + days(3650));
    let good = verified(&gateway, Role::Gateway, fixed_time()).expect("good");
    assert_eq!(good.name, "gateway");

    assert_eq!(
        error_text(&agent, Role::Gateway, fixed_time()),
        "cert.pem: is the certificate of an agent; expected the certificate of a gateway"
    );
    assert_refused(
        &gateway,
        "cert.pem: is the certificate of a gateway; expected the certificate of an agent",
    );
}

#[test]
fn a_certificate_is_valid_from_an_hour_before_it_was_issued_to_its_last_second() {
    let test_ca = TestCa::at(fixed_time());
    let agent = test_ca.agent("edge-1");
    let hour = jiff::SignedDuration::from_hours(1);
    let second = jiff::SignedDuration::from_secs(1);

    verified(&agent, Role::Agent, fixed_time() - hour).expect("an hour before");
    verified(&agent, Role::Agent, fixed_time() + days(365)).expect("its last second");

    assert_eq!(
        error_text(&agent, Role::Agent, fixed_time() + days(365) + second),
        "cert.pem: expired on 2027-03-01T12:00:00Z, and this machine's clock says 2027-03-01T12:00:01Z; replace it by a valid one"
    );
    assert!(
        error_text(&agent, Role::Agent, fixed_time() - hour - second)
            .starts_with("ca.pem: is not valid before 2026-03-01T11:00:00Z")
    );
    let later = test_ca.later(fixed_time() + days(9));
    assert_refused(
        &later.agent("edge-2"),
        "cert.pem: is not valid before 2026-03-10T11:00:00Z, and this machine's clock says 2026-03-01T12:00:00Z; check the clock",
    );
}

#[test]
fn an_expired_ca_is_refused_unless_another_of_its_file_is_valid() {
    let old = TestCa::at(fixed_time() - days(3651));
    let new = TestCa::at(fixed_time());
    let agent = new.agent("edge-1");

    copy(&old.path("ca.pem"), &agent.ca);
    assert_refused(
        &agent,
        "ca.pem: expired on 2026-02-28T12:00:00Z, and this machine's clock says 2026-03-01T12:00:00Z; replace it by a valid one",
    );

    fs::write(&agent.ca, both_cas(&old, &new)).expect("written");
    let good = verified(&agent, Role::Agent, fixed_time()).expect("one of them is valid");
    assert_eq!(good.ca_expires, fixed_time() + days(3650));
}

#[test]
fn a_certificate_of_another_ca_is_refused_with_its_issuer() {
    let (test_ca, other) = (TestCa::at(fixed_time()), TestCa::at(fixed_time()));
    let agent = test_ca.agent("edge-1");
    let own = first_certificate(&agent.ca);
    let issuer = ParsedCertificate::read(&own).expect("a CA").subject;
    let mut namesake = CertificateParams::default();
    let (_, own_name) = issuer.split_once("CN=").expect("a name");
    namesake.distinguished_name = name(["culvert", own_name]);
    namesake.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let namesake = namesake.self_signed(&KeyPair::generate().expect("a key"));
    let namesake = namesake.expect("a CA");
    assert_eq!(subject(namesake.der()), subject(&own));
    let refused = format!("cert.pem: was issued by {issuer}, which is not a CA in ca.pem");

    copy(&other.path("ca.pem"), &agent.ca);
    assert_refused(&agent, &refused);
    fs::write(&agent.ca, namesake.pem()).expect("written");
    assert_refused(&agent, &refused);
}

#[test]
fn a_key_of_another_certificate_is_refused() {
    let test_ca = TestCa::at(fixed_time());
    let (one, two) = (test_ca.agent("edge-1"), test_ca.agent("edge-2"));
    copy(&two.key, &one.key);

    assert_refused(&one, "key.pem: does not match the certificate in cert.pem");
}

#[test]
fn swapped_files_have_an_error_about_the_missing_section() {
    let test_ca = TestCa::at(fixed_time());
    let agent = test_ca.agent("edge-1");
    let with = |ca, cert, key| IdentityFiles { ca, cert, key };
    let IdentityFiles { ca, cert, key } = agent;

    let swapped = with(ca.clone(), key.clone(), cert.clone());
    assert_refused(
        &swapped,
        "key.pem: contains no certificate; a PEM section `CERTIFICATE` is expected",
    );
    let swapped = with(cert.clone(), cert.clone(), key.clone());
    assert_refused(
        &swapped,
        "cert.pem: contains a certificate that is not that of a CA: O=culvert:agents, CN=edge-1",
    );
    let swapped = with(ca.clone(), ca.clone(), key);
    assert!(
        error_text(&swapped, Role::Agent, fixed_time())
            .starts_with("ca.pem: can't be used: its subject is "),
    );
    let swapped = with(ca, cert.clone(), cert);
    assert_refused(
        &swapped,
        "cert.pem: contains no private key; a PEM section `PRIVATE KEY` is expected",
    );
}

#[test]
fn damaged_files_have_an_error_about_the_damage() {
    let test_ca = TestCa::at(fixed_time());
    let agent = test_ca.agent("edge-1");
    let good = fs::read_to_string(&agent.cert).expect("text");
    let lines: Vec<&str> = good.lines().collect();
    let without_end = lines[..lines.len() - 1].join("\n");
    let cut = &good[..good.len() / 2];
    let torn = good.replacen(lines[2], &lines[2][..12], 1);
    let glued = format!("{}{}", good.trim_end(), good);
    let twice = format!("{good}{cut}");
    let more = format!("{good}garbage\n");
    let no_base64 = good.replacen(&lines[2][..4], "!!!!", 1);
    for (content, how) in [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("no PEM\n", "contains no certificate"),
        (cut, NO_END),
        (&without_end, NO_END),
        (&twice, NO_END),
        (&torn, "is damaged: a certificate in it is malformed: "),
        (&no_base64, "is damaged: base64 decode error: "),
        (&glued, NO_LINE),
        (
            &more,
            "is damaged: there is text after the last -----END line",
        ),
    ] {
        fs::write(&agent.cert, content).expect("written");

        let refused = error_text(&agent, Role::Agent, fixed_time());

        assert_has(&refused, &format!("cert.pem: {how}"));
    }

    let with_text = format!("Certificate:\n  Data: what openssl x509 -text prints\n{good}\n\n");
    fs::write(&agent.cert, with_text).expect("written");
    verified(&agent, Role::Agent, fixed_time()).expect("text before a section is no damage");
    fs::write(&agent.cert, good.replace('\n', "\r\n")).expect("written");
    verified(&agent, Role::Agent, fixed_time()).expect("nor are the line ends of Windows");
}

#[test]
fn bytes_after_the_certificate_in_its_section_are_damage() {
    let test_ca = TestCa::at(fixed_time());
    let mut der = first_certificate(&test_ca.agent("edge-1").cert).to_vec();
    der.push(0);

    let parsed = ParsedCertificate::read(&der.into());

    assert_eq!(
        parsed.expect_err("damaged"),
        "a section has bytes after its certificate"
    );
}

#[test]
fn unusable_keys_have_different_errors() {
    let test_ca = TestCa::at(fixed_time());
    let agent = test_ca.agent("edge-1");
    let good = fs::read_to_string(&agent.key).expect("text");
    let renamed = good.replace("END PRIVATE", "END RSA PRIVATE");
    let encrypted = good.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
    let twice = good.repeat(2);
    let hollow = "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\n";
    for (content, reason) in [
        ("", "is empty"),
        (&*encrypted, "contains an encrypted private key"),
        (&*twice, "contains more than one private key"),
        (
            &*renamed,
            "is damaged: a -----BEGIN line and its -----END line have different labels",
        ),
        (hollow, "contains a private key that can't be used: "),
        (&good[..good.len() - 9], NO_LINE),
    ] {
        fs::write(&agent.key, content).expect("written");

        let refused = error_text(&agent, Role::Agent, fixed_time());

        assert_has(&refused, &format!("key.pem: {reason}"));
    }
}

#[test]
fn pipes_devices_and_large_files_are_refused_without_waiting() {
    let test_ca = TestCa::at(fixed_time());
    let agent = test_ca.agent("edge-1");
    fs::remove_file(&agent.key).expect("removed");
    let refused = || error_text(&agent, Role::Agent, fixed_time());

    assert!(refused().starts_with("key.pem: cannot be read: No such file"));
    let mode = nix::sys::stat::Mode::S_IRUSR;
    nix::unistd::mkfifo(&agent.key, mode).expect("a pipe");
    assert_eq!(
        refused(),
        "key.pem: is a directory, pipe or device; a regular file is expected"
    );
    fs::remove_file(&agent.key).expect("removed");
    symlink("/dev/zero", &agent.key).expect("linked");
    assert_eq!(
        refused(),
        "key.pem: is a directory, pipe or device; a regular file is expected"
    );
    fs::remove_file(&agent.key).expect("removed");
    fs::write(&agent.key, vec![b'\n'; (1 << 20) + 1]).expect("written");
    assert!(refused().starts_with("key.pem: is larger than 1048576 bytes"));
}

#[test]
fn a_certificate_for_more_or_less_than_its_role_is_refused() {
    let test_ca = TestCa::at(fixed_time());
    for usages in [&[][..], &[ServerAuth], &[ClientAuth, ServerAuth]] {
        let agent = test_ca.forged([Role::Agent.organization(), "edge-1"], usages);

        let refused = error_text(&agent, Role::Agent, fixed_time());

        assert_has(
            &refused,
            "its extended key usage must be client authentication and nothing else",
        );
    }
}

#[test]
fn a_peer_is_refused_if_its_certificate_names_no_node() {
    let test_ca = TestCa::at(fixed_time());

    let peer =
        identify_agent(&first_certificate(&test_ca.agent("edge-1.site").cert)).expect("an agent");
    assert_eq!(&*peer.node, "edge-1.site");
    assert_eq!(peer.expires, fixed_time() + days(365));

    let refused =
        identify_agent(&first_certificate(&test_ca.gateway().cert)).expect_err("a gateway");
    assert_eq!(
        refused.to_string(),
        "the peer's certificate is not that of an agent: it is a gateway's"
    );
    for node in ["Edge_1", "", "a/b", "edge-1\u{0}", "x\u{1b}[2J"] {
        let forged = test_ca.forged([Role::Agent.organization(), node], &[ClientAuth]);
        let refused = identify_agent(&first_certificate(&forged.cert)).expect_err("no node");
        let refused = refused.to_string();
        assert!(!refused.contains(char::is_control), "{refused:?}");
    }
    let forged = test_ca.forged([Role::Agent.organization(), "edge-1"], &[]);
    identify_agent(&first_certificate(&forged.cert)).expect_err("not for a client");
}
