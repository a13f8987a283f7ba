use rcgen::{Attribute, CustomExtension, IsCa, PKCS_ECDSA_P384_SHA384};

use super::*;

/// A request with an RSA key of 1,024 bits, made with OpenSSL.
const RSA_1024: &str = include_str!("tests/rsa-1024.pem");

/// Returns a request as PEM.
fn signed(params: &CertificateParams) -> String {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
    let request = params.serialize_request(&key).expect("a request");
    request.pem().expect("PEM")
}

fn error_of(pem: &str) -> String {
    CertificateRequest::read(pem.as_bytes()).expect_err("it must be refused")
}

#[test]
fn a_request_is_read_as_it_was_created() {
    for (role, names) in [
        (Role::Agent, vec![]),
        (Role::Gateway, vec![GATEWAY_NAME.to_owned()]),
    ] {
        let new = create(role, "edge-1").expect("a request");
        let read = CertificateRequest::read(new.request.as_bytes()).expect("well-formed");

        assert_eq!(read.organizations, [role.organization()]);
        assert_eq!(read.common_names, ["edge-1"]);
        assert_eq!(read.subject_attributes, 2);
        assert_eq!(read.dns_names, names);
        assert_eq!((read.other_name, read.extra), (None, None));
        let key = KeyPair::from_pem(&new.key).expect("a key");
        assert_eq!(
            rcgen::PublicKeyData::der_bytes(&read.public_key),
            key.public_key_raw()
        );
    }
}

#[test]
fn anything_but_one_block_is_refused() {
    let one = create(Role::Agent, "edge-1").expect("a request").request;
    let other_label = one.replace("CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST");
    let body = one.lines().nth(1).expect("a line");
    for (pem, why) in [
        (String::new(), "empty"),
        (format!("{one}{one}"), "exactly one PEM block"),
        (format!("hello\n{one}"), "text around"),
        (format!("{one}hello\n"), "text after"),
        (format!(" {one}"), "-----BEGIN"),
        (other_label, "exactly one PEM block"),
        (
            one.replace(body, &body.replace(char::is_alphabetic, "*")),
            "",
        ),
        (one.repeat(200), "at most 8192"),
        (
            one.lines().take(3).collect::<Vec<_>>().join("\n"),
            "-----END",
        ),
    ] {
        let error = error_of(&pem);
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn a_key_of_another_kind_is_refused() {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).expect("a key");
    let request = CertificateParams::default().serialize_request(&key);
    let p384 = request.expect("a request").pem().expect("PEM");

    for pem in [&*p384, RSA_1024] {
        let error = error_of(pem);
        assert!(error.contains("curve P-256"), "{error}");
    }
}

#[test]
fn a_request_that_was_changed_after_it_was_signed_is_refused() {
    let mut params = CertificateParams::default();
    params.distinguished_name = subject(Role::Agent, "edge-1");
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
    let request = params.serialize_request(&key).expect("a request");
    let der = request.der().to_vec();
    let at = der
        .windows(6)
        .position(|window| window == b"edge-1")
        .expect("the name");
    let changed = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut der = der.clone();
        edit(&mut der);
        to_pem(&der)
    };

    CertificateRequest::read(changed(&|_| {}).as_bytes()).expect("well-formed");
    let error = error_of(&changed(&|der| der[at + 5] = b'2'));
    assert!(error.contains("its signature"), "{error}");
    let error = error_of(&changed(&|der| der.push(0)));
    assert!(error.contains("extra bytes"), "{error}");
    // The version is the first value of the signed part.
    let error = error_of(&changed(&|der| der[8] = 1));
    assert!(error.contains("version"), "{error}");
}

fn to_pem(der: &[u8]) -> String {
    // Kubernetes' type for bytes is base64 in JSON.
    let body = serde_json::to_string(&k8s_openapi::ByteString(der.to_vec())).expect("JSON");
    let body = body.trim_matches('"');
    let lines: Vec<_> = body
        .as_bytes()
        .chunks(64)
        .map(String::from_utf8_lossy)
        .collect();
    format!(
        "-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n",
        lines.join("\n")
    )
}

#[test]
fn names_and_extensions_of_every_kind_are_found() {
    let read = |edit: &dyn Fn(&mut CertificateParams)| {
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(Role::Agent, "edge-1");
        edit(&mut params);
        CertificateRequest::read(signed(&params).as_bytes()).expect("well-formed")
    };
    let name = |text: &str| text.try_into().expect("ASCII");
    for other in [
        SanType::Rfc822Name(name("root@example")),
        SanType::URI(name("spiffe://example/a")),
        SanType::IpAddress([192, 0, 2, 1].into()),
    ] {
        let read = read(&|params| {
            params.subject_alt_names = vec![SanType::DnsName(name("a.example")), other.clone()];
        });
        assert_eq!(read.dns_names, ["a.example"]);
        assert!(read.other_name.is_some(), "{other:?}");
    }
    let as_ca = read(&|params| params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained));
    assert_eq!(as_ca.extra.as_deref(), Some("the right to act as a CA"));
    let unknown = read(&|params| {
        let extension = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
        params.custom_extensions = vec![extension];
    });
    assert_eq!(unknown.extra.as_deref(), Some("the extension 1.2.3.4"));
    let usage = read(&|params| params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign]);
    assert_eq!(usage.extra.as_deref(), Some("the extension 2.5.29.15"));
}

#[test]
fn another_attribute_is_found() {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
    // A challenge password (RFC 2985 section 5.4.1).
    let password = Attribute {
        oid: &[1, 2, 840, 113_549, 1, 9, 7],
        values: vec![0x31, 4, 0x0c, 2, b'p', b'w'],
    };
    let request = CertificateParams::default()
        .serialize_request_with_attributes(&key, vec![password])
        .expect("a request");

    let read = CertificateRequest::read(request.pem().expect("PEM").as_bytes());

    let extra = read.expect("well-formed").extra.expect("the attribute");
    assert!(extra.contains("1.2.840.113549.1.9.7"), "{extra}");
}
