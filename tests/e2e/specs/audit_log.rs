//! Reads Culvert's requests from the audit log of the API server.

use std::{
    fs,
    io::{BufRead as _, BufReader},
};

use anyhow::Result;
use serde_json::Value;

use crate::fixture::Fixture;

/// Prefix of the user names of Culvert's service accounts.
const USER_PREFIX: &str = "system:serviceaccount:kube-system:culvert-";

/// Returns all requests of Culvert's service accounts since the start of the cluster, each with the name of
/// the account after [`USER_PREFIX`].
pub(super) fn requests(fixture: &Fixture<'_>) -> Result<Vec<(String, Value)>> {
    let path = fixture.cluster.shared.logs.path("audit.jsonl");
    let mut requests = Vec::new();
    for line in BufReader::new(fs::File::open(&path)?).lines() {
        // A killed API server may have left an incomplete line.
        let Ok(request) = serde_json::from_str::<Value>(&line?) else {
            continue;
        };
        let user = request["user"]["username"].as_str().unwrap_or_default();
        if let Some(account) = user.strip_prefix(USER_PREFIX)
            && request["objectRef"].is_object()
        {
            requests.push((account.to_owned(), request));
        }
    }
    Ok(requests)
}
