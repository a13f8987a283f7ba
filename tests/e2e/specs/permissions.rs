//! Compares the permissions of Culvert's service accounts with the requests that the accounts make.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::audit_log;
use crate::fixture::Fixture;

const NAMESPACE: &str = "kube-system";

/// The roles that are bound to each service account.
const ROLES: [(&str, &[&str]); 4] = [
    ("agent", &["clusterrole/culvert-certificate-requester"]),
    (
        "cloud",
        &[
            "clusterrole/culvert-node",
            "role/culvert-cloud",
            "clusterrole/culvert-certificate-requester",
        ],
    ),
    (
        "controller",
        &["clusterrole/culvert-controller", "role/culvert-controller"],
    ),
    ("node", &["clusterrole/culvert-node"]),
];

/// The resource of the right to approve and sign, which the API server checks as a part of other requests.
const SIGNERS: &str = "signers";

/// A permission: the account, API group, resource and verb.
type Permission = (String, String, String, String);

/// Expects every account to use all of its permissions, and to request nothing else. This test runs last,
/// since it checks all requests made since the cluster started.
pub(super) fn are_all_used(fixture: &Fixture<'_>) -> Result<()> {
    check_agent(fixture)?;
    check_secrets(fixture)?;
    let mut granted = granted_permissions(fixture)?;
    granted.retain(|(_, _, resource, _)| resource != SIGNERS);
    let (used, refused) = requested_permissions(fixture)?;
    // A request may be refused at first and succeed later, since an API server refuses everything until it
    // has read the roles.
    let denied: Vec<_> = refused.difference(&used).collect();
    ensure!(denied.is_empty(), "requests without permission: {denied:?}");
    let unused: Vec<_> = granted.difference(&used).collect();
    ensure!(
        unused.is_empty(),
        "permissions that are never used: {unused:?}"
    );
    let others: Vec<_> = used.difference(&granted).collect();
    ensure!(
        others.is_empty(),
        "permissions that no role of Culvert grants: {others:?}"
    );
    Ok(())
}

/// Expects the account of the agents to have one right that every account does not have: to request certificates.
fn check_agent(fixture: &Fixture<'_>) -> Result<()> {
    let rights = |account: &str| -> Result<BTreeSet<String>> {
        let user = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
        let list = fixture
            .kubectl()
            .run(&["auth", "can-i", "--list", &user, "-n", NAMESPACE])?;
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(list.lines().map(words).collect())
    };
    let (agent, anybody) = (rights("culvert-agent")?, rights("default")?);
    let own: Vec<_> = agent.difference(&anybody).collect();
    let expected = "certificatesigningrequests.certificates.k8s.io [] [] [create get]";
    ensure!(own == [expected], "the rights of the agents are {own:?}");
    Ok(())
}

/// Expects only the controller to read a Secret, and only one.
fn check_secrets(fixture: &Fixture<'_>) -> Result<()> {
    let may_read = |account: &str, verb: &str, secret: &str| {
        let user = format!("--as=system:serviceaccount:{NAMESPACE}:culvert-{account}");
        let arguments = ["auth", "can-i", verb, secret, &user, "-n", NAMESPACE];
        fixture.kubectl().run(&arguments).is_ok()
    };
    for (account, _) in ROLES {
        for (verb, secret) in [
            ("get", "secrets/culvert-ca"),
            ("get", "secrets/another"),
            ("list", "secrets"),
        ] {
            let expected = (account, secret) == ("controller", "secrets/culvert-ca");
            ensure!(
                may_read(account, verb, secret) == expected,
                "culvert-{account} may {verb} {secret}: {}",
                !expected
            );
        }
    }
    Ok(())
}

/// Returns the permissions in Culvert's roles.
fn granted_permissions(fixture: &Fixture<'_>) -> Result<BTreeSet<Permission>> {
    let mut granted = BTreeSet::new();
    for (account, roles) in ROLES {
        for role in roles {
            let object = fixture.kubectl().get(&["-n", NAMESPACE, role])?;
            let rules = object["rules"]
                .as_array()
                .with_context(|| format!("{role} has no rules"))?;
            granted.extend(rules.iter().flat_map(|rule| permissions(account, rule)));
        }
    }
    Ok(granted)
}

/// Returns the permissions that a role's rule grants to an account.
fn permissions(account: &str, rule: &Value) -> Vec<Permission> {
    let texts = |name: &str| -> Vec<String> {
        let values = rule[name].as_array().into_iter().flatten();
        values
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect()
    };
    let mut permissions = Vec::new();
    for group in texts("apiGroups") {
        for resource in texts("resources") {
            let permission = |verb| (account.to_owned(), group.clone(), resource.clone(), verb);
            permissions.extend(texts("verbs").into_iter().map(permission));
        }
    }
    permissions
}

/// Returns the permissions that allowed requests used, and those that refused requests would have needed.
fn requested_permissions(
    fixture: &Fixture<'_>,
) -> Result<(BTreeSet<Permission>, BTreeSet<Permission>)> {
    let (mut used, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for (account, request) in audit_log::requests(fixture)? {
        let target = &request["objectRef"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let resource = text(&target["resource"]);
        let resource = match target["subresource"].as_str() {
            Some(subresource) => format!("{resource}/{subresource}"),
            None => resource,
        };
        let permission = (
            account.clone(),
            text(&target["apiGroup"]),
            resource,
            text(&request["verb"]),
        );
        if request["responseStatus"]["code"] == 403 {
            refused.insert(permission);
        } else {
            used.insert(permission);
        }
    }
    Ok((used, refused))
}
