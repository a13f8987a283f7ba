//! Compares the permissions of Culvert's service accounts with the requests that the accounts make.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::audit_log;
use crate::fixture::Fixture;

const NAMESPACE: &str = "kube-system";

/// The roles that are bound to each service account.
const ROLES: [(&str, &[&str]); 2] = [
    ("node", &["clusterrole/culvert-node"]),
    ("cloud", &["clusterrole/culvert-node", "role/culvert-cloud"]),
];

/// A permission: the account, API group, resource and verb.
type Permission = (String, String, String, String);

/// Expects every account to use all of its permissions, and to request nothing else. This test runs last,
/// since it checks all requests made since the cluster started.
pub(super) fn are_all_used(fixture: &Fixture<'_>) -> Result<()> {
    let granted = granted_permissions(fixture)?;
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

/// Returns the permissions in Culvert's roles.
fn granted_permissions(fixture: &Fixture<'_>) -> Result<BTreeSet<Permission>> {
    let mut granted = BTreeSet::new();
    for (account, roles) in ROLES {
        for role in roles {
            let arguments = ["-n", NAMESPACE, "get", role, "-o", "json"];
            let object: Value = serde_json::from_str(&fixture.kubectl().run(&arguments)?)?;
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
        let permission = (
            account.clone(),
            text(&target["apiGroup"]),
            text(&target["resource"]),
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
