use rcgen::{
    CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, KeyPair,
    PKCS_ECDSA_P256_SHA256, SanType,
};

use super::*;

const AGENTS: &str = "system:serviceaccount:kube-system:culvert-agent";
const GATEWAYS: &str = "system:serviceaccount:kube-system:culvert-cloud";
const UID: &str = "5b1e0a7c";

/// A request that meets all rules, which each case changes in one respect.
#[derive(Clone)]
struct Case {
    role: Role,
    subject: Vec<(DnType, &'static str)>,
    names: Vec<SanType>,
    edit: fn(&mut CertificateParams),
    edit_pem: fn(String) -> String,
    usages: Vec<&'static str>,
    user: String,
    groups: Vec<&'static str>,
    extra: Vec<(&'static str, Vec<&'static str>)>,
    expiration_seconds: Option<i64>,
    node: Option<NodeFacts>,
    is_listed: bool,
}

fn good(role: Role) -> Case {
    let name = |text: &str| SanType::DnsName(text.try_into().expect("ASCII"));
    Case {
        role,
        subject: vec![
            (DnType::OrganizationName, role.organization()),
            (DnType::CommonName, "edge-1"),
        ],
        names: match role {
            Role::Agent => vec![],
            Role::Gateway => vec![name(GATEWAY_NAME)],
        },
        edit: |_| {},
        edit_pem: |pem| pem,
        usages: match role {
            Role::Agent => vec!["digital signature", "client auth"],
            Role::Gateway => vec!["digital signature", "server auth"],
        },
        user: match role {
            Role::Agent => AGENTS,
            Role::Gateway => GATEWAYS,
        }
        .to_owned(),
        groups: vec!["system:authenticated"],
        extra: vec![(NODE_NAME, vec!["edge-1"]), (NODE_UID, vec![UID])],
        expiration_seconds: Some(3600),
        node: Some(NodeFacts {
            uid: UID.to_owned(),
            is_being_deleted: false,
        }),
        is_listed: false,
    }
}

/// Returns the request of the kubelet of `edge-1`.
fn kubelet() -> Case {
    Case {
        user: "system:node:edge-1".to_owned(),
        groups: vec!["system:nodes", "system:authenticated"],
        extra: vec![],
        ..good(Role::Agent)
    }
}

fn rules() -> Rules {
    Rules {
        agents: AGENTS.to_owned(),
        gateways: GATEWAYS.to_owned(),
        max_life: 86_400,
    }
}

fn decide(case: &Case) -> Result<Candidate, Denied> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    for (kind, value) in &case.subject {
        params.distinguished_name.push(kind.clone(), *value);
    }
    params.subject_alt_names.clone_from(&case.names);
    (case.edit)(&mut params);
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).expect("a key");
    let request = params.serialize_request(&key).expect("a request");
    let request = (case.edit_pem)(request.pem().expect("PEM"));
    let owned = |texts: &[&str]| {
        texts
            .iter()
            .map(|text| (*text).to_owned())
            .collect::<Vec<_>>()
    };
    let extra = case.extra.iter();
    let extra = extra.map(|(key, values)| ((*key).to_owned(), owned(values)));
    let asked = Asked {
        role: case.role,
        request: request.as_bytes(),
        usages: &owned(&case.usages),
        user: &case.user,
        groups: &owned(&case.groups),
        extra: &extra.collect(),
        expiration_seconds: case.expiration_seconds,
    };
    let candidate = rules().check(&asked)?;
    rules().check_node(&candidate, case.node.as_ref(), case.is_listed)?;
    Ok(candidate)
}

/// Checks that a request is denied for a reason, with a sentence that contains a text.
fn expect(case: &Case, denial: Denial, text: &str) {
    let denied = decide(case).expect_err(text);
    assert_eq!(denied.denial, denial, "{}", denied.message);
    assert!(denied.message.contains(text), "{}: {text}", denied.message);
}

#[test]
fn requests_that_meet_all_rules_are_approved() {
    for case in [good(Role::Agent), good(Role::Gateway), kubelet()] {
        for seconds in [None, Some(600), Some(86_400)] {
            let case = Case {
                expiration_seconds: seconds,
                ..case.clone()
            };
            let candidate = decide(&case).expect("approved");
            assert_eq!(candidate.node, "edge-1");
            assert_eq!(candidate.life, seconds.unwrap_or(86_400));
        }
    }
}

#[test]
fn requests_of_another_form_are_denied() {
    for role in [Role::Agent, Role::Gateway] {
        let twice = |pem: String| format!("{pem}{pem}");
        let edits: [fn(String) -> String; 3] =
            [twice, |pem| format!("# mine\n{pem}"), |pem| pem.repeat(250)];
        for edit_pem in edits {
            let case = Case {
                edit_pem,
                ..good(role)
            };
            expect(&case, Denial::Form, "the request can't be used");
        }
    }
}

#[test]
fn other_usages_are_denied() {
    for (role, usages) in [
        (Role::Agent, vec!["digital signature", "server auth"]),
        (
            Role::Agent,
            vec!["digital signature", "client auth", "server auth"],
        ),
        (
            Role::Agent,
            vec!["digital signature", "client auth", "cert sign"],
        ),
        (Role::Agent, vec!["client auth"]),
        (Role::Agent, vec!["client auth", "client auth"]),
        (Role::Agent, vec!["any"]),
        (Role::Agent, vec![]),
        (Role::Gateway, vec!["digital signature", "client auth"]),
        (
            Role::Gateway,
            vec!["digital signature", "client auth", "server auth"],
        ),
    ] {
        let case = Case {
            usages,
            ..good(role)
        };
        expect(&case, Denial::Usages, "exactly");
    }
}

#[test]
fn other_subjects_are_denied() {
    // A second attribute of a kind has to look like another one to the library.
    let second = |last| DnType::CustomDnType(vec![2, 5, 4, last]);
    for role in [Role::Agent, Role::Gateway] {
        let own = (DnType::OrganizationName, role.organization());
        let node = (DnType::CommonName, "edge-1");
        for subject in [
            vec![node.clone()],
            vec![own.clone()],
            vec![(DnType::OrganizationName, ""), node.clone()],
            vec![(DnType::OrganizationName, "system:masters"), node.clone()],
            vec![own.clone(), (second(10), "system:masters"), node.clone()],
            vec![(second(10), "system:masters"), own.clone(), node.clone()],
            vec![own.clone(), node.clone(), (second(3), "edge-2")],
            vec![own.clone(), node.clone(), (DnType::CountryName, "NL")],
            vec![own.clone(), node.clone(), (second(11), "unit")],
            vec![own.clone(), (DnType::CommonName, "")],
            vec![own.clone(), (DnType::CommonName, "system:node:edge-1")],
            vec![own.clone(), (DnType::CommonName, "Edge-1")],
            vec![],
        ] {
            let case = Case {
                subject: subject.clone(),
                ..good(role)
            };
            expect(&case, Denial::Subject, "");
        }
    }
    let other_role = Case {
        subject: good(Role::Gateway).subject,
        ..good(Role::Agent)
    };
    expect(&other_role, Denial::Subject, "culvert:agents");
}

#[test]
fn other_names_are_denied() {
    let name = |text: &str| text.try_into().expect("ASCII");
    let gateway = SanType::DnsName(name(GATEWAY_NAME));
    let mail = SanType::Rfc822Name(name("root@example"));
    let uri = SanType::URI(name("spiffe://example/a"));
    let address = SanType::IpAddress([192, 0, 2, 1].into());
    for (role, names) in [
        (Role::Agent, vec![gateway.clone()]),
        (Role::Agent, vec![mail.clone()]),
        (Role::Agent, vec![uri.clone()]),
        (Role::Agent, vec![address.clone()]),
        (Role::Gateway, vec![]),
        (Role::Gateway, vec![gateway.clone(), gateway.clone()]),
        (
            Role::Gateway,
            vec![SanType::DnsName(name("kubernetes.default.svc"))],
        ),
        (Role::Gateway, vec![gateway.clone(), mail]),
        (Role::Gateway, vec![gateway.clone(), uri]),
        (Role::Gateway, vec![gateway, address]),
    ] {
        let case = Case {
            names,
            ..good(role)
        };
        expect(&case, Denial::AlternativeNames, "asks for the name");
    }
}

#[test]
fn extensions_are_denied() {
    let edits: [fn(&mut CertificateParams); 3] = [
        |params| params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained),
        |params| params.is_ca = IsCa::ExplicitNoCa,
        |params| {
            let unknown = CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
            params.custom_extensions = vec![unknown];
        },
    ];
    for role in [Role::Agent, Role::Gateway] {
        for edit in edits {
            let case = Case { edit, ..good(role) };
            expect(&case, Denial::Extensions, "nothing of that kind");
        }
    }
}

#[test]
fn other_requesters_are_denied() {
    for role in [Role::Agent, Role::Gateway] {
        for (extra, text) in [
            (vec![], "not bound to a Node"),
            (vec![(NODE_NAME, vec!["edge-1"])], "not bound to a Node"),
            (vec![(NODE_UID, vec![UID])], "not bound to a Node"),
            (
                vec![(NODE_NAME, vec!["edge-1", "edge-2"]), (NODE_UID, vec![UID])],
                "not bound to a Node",
            ),
            (
                vec![(NODE_NAME, vec!["edge-2"]), (NODE_UID, vec![UID])],
                "a pod on Node edge-2",
            ),
        ] {
            let case = Case {
                extra,
                ..good(role)
            };
            expect(&case, Denial::Requester, text);
        }
        for user in [
            "system:serviceaccount:default:culvert-agent",
            "system:serviceaccount:kube-system:default",
            "system:admin",
            "",
        ] {
            let case = Case {
                user: user.to_owned(),
                ..good(role)
            };
            expect(&case, Denial::Requester, "made the request; only");
        }
    }
    let crossed = Case {
        user: AGENTS.to_owned(),
        ..good(Role::Gateway)
    };
    expect(&crossed, Denial::Requester, GATEWAYS);
    let of_gateway = Case {
        groups: kubelet().groups,
        user: kubelet().user,
        ..good(Role::Gateway)
    };
    expect(&of_gateway, Denial::Requester, "made the request; only");
}

#[test]
fn other_kubelets_are_denied() {
    let other = Case {
        user: "system:node:edge-2".to_owned(),
        ..kubelet()
    };
    expect(&other, Denial::Requester, "the kubelet of Node edge-2");
    let no_member = Case {
        groups: vec!["system:authenticated"],
        ..kubelet()
    };
    expect(&no_member, Denial::Requester, "made the request; only");
}

#[test]
fn nodes_that_are_missing_new_leaving_or_listed_are_denied() {
    for role in [Role::Agent, Role::Gateway] {
        let facts = |uid: &str, is_being_deleted| {
            Some(NodeFacts {
                uid: uid.to_owned(),
                is_being_deleted,
            })
        };
        for (node, text) in [
            (None, "there is no Node edge-1"),
            (facts("other", false), "created again"),
            (facts(UID, true), "is being deleted"),
        ] {
            expect(&Case { node, ..good(role) }, Denial::Node, text);
        }
        let listed = Case {
            is_listed: true,
            ..good(role)
        };
        expect(&listed, Denial::Listed, "on the deny list");
    }
}

#[test]
fn lives_out_of_range_are_denied() {
    for seconds in [i64::MIN, -1, 0, 599, 86_401, i64::MAX] {
        let case = Case {
            expiration_seconds: Some(seconds),
            ..good(Role::Agent)
        };
        expect(&case, Denial::Life, "from 600 to 86400");
    }
}

#[test]
fn a_denial_names_the_node_of_the_requester_or_else_the_one_asked_for() {
    let of = |case: &Case| decide(case).expect_err("denied").node;
    let by_another = Case {
        extra: vec![(NODE_NAME, vec!["edge-2"]), (NODE_UID, vec![UID])],
        ..good(Role::Agent)
    };
    assert_eq!(of(&by_another).as_deref(), Some("edge-2"));
    let by_nobody = Case {
        user: "system:admin".to_owned(),
        extra: vec![],
        ..good(Role::Agent)
    };
    assert_eq!(of(&by_nobody).as_deref(), Some("edge-1"));
    let malformed = Case {
        edit_pem: |_| String::new(),
        extra: vec![(NODE_NAME, vec!["../../evil"])],
        ..good(Role::Agent)
    };
    assert_eq!(of(&malformed), None);
}
