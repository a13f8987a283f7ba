//! The daemons' rights in the cluster, and their use.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::audit;
use crate::stage::Stage;

const NAMESPACE: &str = "kube-system";

/// The roles of each service account.
const ROLES: [(&str, &[&str]); 2] = [
    ("node", &["clusterrole/culvert-node"]),
    ("cloud", &["clusterrole/culvert-node", "role/culvert-cloud"]),
];

/// A right: account, API group, resource and verb.
type Right = (String, String, String, String);

/// Expects every account to use every right of the manifests, and to try nothing else. It uses the
/// requests since the cluster's start, so this spec runs last.
pub(super) fn are_what_is_used(stage: &Stage<'_>) -> Result<()> {
    let granted = granted(stage)?;
    let (used, refused) = used(stage)?;
    // An API server that has just started refuses all requests until it has read the roles.
    let denied: Vec<_> = refused.difference(&used).collect();
    ensure!(denied.is_empty(), "refused: {denied:?}");
    let unused: Vec<_> = granted.difference(&used).collect();
    ensure!(unused.is_empty(), "granted, and never used: {unused:?}");
    let others: Vec<_> = used.difference(&granted).collect();
    ensure!(others.is_empty(), "used, and granted elsewhere: {others:?}");
    Ok(())
}

fn granted(stage: &Stage<'_>) -> Result<BTreeSet<Right>> {
    let mut granted = BTreeSet::new();
    for (account, roles) in ROLES {
        for role in roles {
            let words = ["-n", NAMESPACE, "get", role, "-o", "json"];
            let role: Value = serde_json::from_str(&stage.kubectl().run(&words)?)?;
            let rules = role["rules"].as_array().context("a role without rules")?;
            granted.extend(rules.iter().flat_map(|rule| rights(account, rule)));
        }
    }
    Ok(granted)
}

/// Returns the rights that a rule of a role gives to an account.
fn rights(account: &str, rule: &Value) -> Vec<Right> {
    let texts = |name: &str| -> Vec<String> {
        let values = rule[name].as_array().into_iter().flatten();
        values
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect()
    };
    let mut rights = Vec::new();
    for group in texts("apiGroups") {
        for resource in texts("resources") {
            let right = |verb| (account.to_owned(), group.clone(), resource.clone(), verb);
            rights.extend(texts("verbs").into_iter().map(right));
        }
    }
    rights
}

/// Returns the used rights, and those of refused requests.
fn used(stage: &Stage<'_>) -> Result<(BTreeSet<Right>, BTreeSet<Right>)> {
    let (mut used, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for (account, request) in audit::requests(stage)? {
        let target = &request["objectRef"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let right = (
            account.clone(),
            text(&target["apiGroup"]),
            text(&target["resource"]),
            text(&request["verb"]),
        );
        if request["responseStatus"]["code"] == 403 {
            refused.insert(right);
        } else {
            used.insert(right);
        }
    }
    Ok((used, refused))
}
