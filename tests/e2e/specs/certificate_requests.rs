//! Sends requests for certificates that break a rule to the API server, each as the user that would make it.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::ByteString;
use serde_json::json;
use tunnel_tests::{
    certificate_request::{
        Attribute::{self, CommonName, Organization, Second},
        CertificateRequest, Name,
    },
    wait,
};

use super::controller::denied_requests;
use crate::fixture::Fixture;

/// The time limit for all requests to be denied.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The signers.
const AGENT: &str = "culvert.dev/tunnel-agent";
const GATEWAY: &str = "culvert.dev/tunnel-gateway";

/// The account of the agents.
const AGENTS: &str = "system:serviceaccount:kube-system:culvert-agent";

/// The prefix of the requests' names.
const PREFIX: &str = "attack-";

/// A request, and the user that makes it.
struct Attack {
    signer: &'static str,
    request: CertificateRequest,
    edit: fn(String) -> String,
    usages: [&'static str; 2],
    user: String,
    /// The name and the uid of the Node that the user's token is bound to.
    node: Option<[String; 2]>,
    expiration_seconds: u32,
    /// The name of a Node that has been deleted and created again, and the uid that it had before.
    earlier_node: [String; 2],
}

/// A change that makes an allowed request break a rule, and the reason of the denial.
type Change = (&'static str, fn(&mut Attack));

/// The changes. Each makes the request break the rule with its reason, and no rule before that one.
const CHANGES: [Change; 20] = [
    ("MalformedRequest", |it| it.request.has_larger_key = true),
    ("MalformedRequest", |it| {
        it.edit = |_| include_str!("rsa_1024_request.pem").to_owned();
    }),
    ("MalformedRequest", |it| it.edit = |pem| pem.repeat(2)),
    ("MalformedRequest", |it| {
        it.edit = |pem| pem + &"x".repeat(100_000);
    }),
    ("WrongUsages", |it| it.usages[1] = "server auth"),
    ("WrongSubject", |it| {
        it.request.subject[0] = organization("")
    }),
    ("WrongSubject", |it| {
        it.request.subject[0] = organization("system:masters");
    }),
    ("WrongSubject", |it| {
        it.request
            .subject
            .push(Second(10, "system:masters".to_owned()));
    }),
    ("WrongSubject", |it| {
        it.request.subject.push(Second(3, "node-a".to_owned()));
    }),
    ("WrongAlternativeNames", |it| {
        it.request.names.push(Name::Mail("root@example"));
    }),
    ("WrongAlternativeNames", |it| {
        it.request.names.push(Name::Uri("spiffe://example/a"));
    }),
    ("UnexpectedExtension", |it| it.request.is_ca = true),
    ("UnexpectedExtension", |it| {
        it.request.has_unknown_extension = true;
    }),
    ("WrongRequester", |it| {
        it.request.subject[1] = CommonName("node-a".to_owned());
    }),
    ("WrongRequester", |it| it.node = None),
    ("WrongRequester", |it| {
        it.user = "system:serviceaccount:kube-system:culvert-cloud".to_owned();
    }),
    ("WrongRequester", |it| {
        it.signer = GATEWAY;
        it.request.subject[0] = organization("culvert:gateways");
        it.request.names.push(Name::Dns("gateway.culvert.dev"));
        it.usages[1] = "server auth";
    }),
    ("WrongNode", |it| {
        it.node = it.node.take().map(|[name, _]| [name, "another".to_owned()]);
    }),
    ("WrongNode", |it| {
        let [name, _] = &it.earlier_node;
        it.request.subject[1] = CommonName(name.clone());
        it.node = Some(it.earlier_node.clone());
    }),
    ("WrongExpirationSeconds", |it| {
        it.expiration_seconds = 31 * 86_400
    }),
];

fn organization(name: &str) -> Attribute {
    Organization(name.to_owned())
}

/// Expects every request to be denied with the reason of its rule, and without a certificate; the Node to have an Event for
/// each reason; and the controllers to have counted the requests.
pub(super) fn are_denied(fixture: &Fixture<'_>) -> Result<()> {
    let edge = fixture.cluster.nodes.iter().find(|node| node.is_edge());
    let edge = edge.context("the cluster has no edge node")?.name;
    let path = "jsonpath={.metadata.uid}";
    let uid = fixture.kubectl().run(&["get", "node", edge, "-o", path])?;
    let earlier_node = create_twice(fixture)?;
    let denied = send_all(fixture, [edge, &uid], &earlier_node);
    let [earlier_node, _] = &earlier_node;
    fixture.kubectl().run(&["delete", "node", earlier_node])?;
    denied?;
    check_events(fixture, edge)
}

/// Creates a Node, deletes it and creates it again. Returns its name and the uid that it had first.
fn create_twice(fixture: &Fixture<'_>) -> Result<[String; 2]> {
    let name = format!("{PREFIX}node");
    let kubectl = fixture.kubectl();
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}).to_string();
    kubectl.apply(&node)?;
    let uid = kubectl.get(&["node", &name])?["metadata"]["uid"].take();
    kubectl.run(&["delete", "node", &name])?;
    kubectl.apply(&node)?;
    let uid = uid.as_str().context("the Node has no uid")?.to_owned();
    Ok([name, uid])
}

/// Sends all requests, and waits until they are denied and counted.
fn send_all(
    fixture: &Fixture<'_>,
    [edge, uid]: [&str; 2],
    earlier_node: &[String; 2],
) -> Result<()> {
    let before = denied_requests(fixture)?;
    for (number, (_, change)) in CHANGES.iter().enumerate() {
        let mut attack = allowed(edge, uid, earlier_node);
        change(&mut attack);
        attack.send(fixture, number)?;
    }
    let denied = || found_reasons(fixture).is_ok_and(|found| found.iter().all(Option::is_some));
    wait::until(TIMEOUT, denied)
        .with_context(|| format!("not all are denied: {:?}", found_reasons(fixture)))?;
    for (number, (found, (reason, _))) in found_reasons(fixture)?.iter().zip(CHANGES).enumerate() {
        let found = found.as_deref().unwrap_or_default();
        ensure!(found == reason, "{PREFIX}{number}: {found}, not {reason}");
    }
    let counted = denied_requests(fixture)? - before;
    let expected = u64::try_from(CHANGES.len())?;
    ensure!(
        counted == expected,
        "{counted} of {expected} denials are counted"
    );
    Ok(())
}

/// Returns a request that meets all rules.
fn allowed(node: &str, uid: &str, earlier_node: &[String; 2]) -> Attack {
    Attack {
        signer: AGENT,
        request: CertificateRequest {
            subject: vec![organization("culvert:agents"), CommonName(node.to_owned())],
            ..CertificateRequest::default()
        },
        edit: |pem| pem,
        usages: ["digital signature", "client auth"],
        user: AGENTS.to_owned(),
        node: Some([node, uid].map(str::to_owned)),
        expiration_seconds: 600,
        earlier_node: earlier_node.clone(),
    }
}

impl Attack {
    /// Creates the request as its user. The API server fills in the user, and what its token is bound to.
    fn send(&self, fixture: &Fixture<'_>, number: usize) -> Result<()> {
        let request = ByteString((self.edit)(self.request.pem()?).into_bytes());
        // The API server accepts a year that other programs can't represent.
        let fields_of_another = json!({
            "manager": "another",
            "operation": "Update",
            "apiVersion": "certificates.k8s.io/v1",
            "time": "9999-12-31T23:59:59Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": { "f:metadata": { "f:labels": { "f:another": {} } } },
        });
        let object = json!({
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": { "name": format!("{PREFIX}{number}"), "managedFields": [fields_of_another] },
            "spec": {
                "signerName": self.signer,
                "request": request,
                "usages": self.usages,
                "expirationSeconds": self.expiration_seconds,
            },
        });
        let mut arguments = vec![
            format!("--as={}", self.user),
            "--as-group=system:authenticated".to_owned(),
            "--as-group=system:serviceaccounts".to_owned(),
            "--as-group=system:serviceaccounts:kube-system".to_owned(),
        ];
        for (key, value) in ["name", "uid"].into_iter().zip(self.node.iter().flatten()) {
            let key = format!("authentication.kubernetes.io/node-{key}");
            arguments.push(format!("--as-user-extra={key}={value}"));
        }
        fixture.kubectl().create_as(&object.to_string(), &arguments)
    }
}

/// Returns the reason for which each request is denied, if it is and has no certificate.
fn found_reasons(fixture: &Fixture<'_>) -> Result<Vec<Option<String>>> {
    let list = fixture.kubectl().get(&["csr"])?;
    let all = list["items"].as_array().context("no list")?;
    let reason_of = |number| {
        let name = format!("{PREFIX}{number}");
        let request = all.iter().find(|it| it["metadata"]["name"] == name)?;
        let status = &request["status"];
        let conditions = status["conditions"].as_array()?;
        let denied = conditions.iter().find(|it| it["type"] == "Denied")?;
        let reason = denied["reason"].as_str()?.to_owned();
        status["certificate"].is_null().then_some(reason)
    };
    Ok((0..CHANGES.len()).map(reason_of).collect())
}

/// Expects Events on the Node about each reason for which a request with its name was denied.
fn check_events(fixture: &Fixture<'_>, node: &str) -> Result<()> {
    let selector = format!("--field-selector=involvedObject.kind=Node,involvedObject.name={node}");
    let list = fixture.kubectl().get(&["events", "-A", &selector])?;
    let events = list["items"].as_array().into_iter().flatten();
    let events = events.filter(|event| event["reason"] == "CertificateDenied");
    let messages: BTreeSet<String> = events.map(|event| event["message"].to_string()).collect();
    for (reason, _) in CHANGES {
        let reason_in_message = format!("({reason})");
        let is_about =
            |message: &String| message.contains(PREFIX) && message.contains(&reason_in_message);
        ensure!(
            messages.iter().any(is_about),
            "the Node has no Event for {reason}: {messages:?}"
        );
    }
    Ok(())
}
