//! Reads Culvert's requests from the API server's audit log.

use std::{
    fs,
    io::{BufRead as _, BufReader},
};

use anyhow::Result;
use serde_json::Value;

use crate::fixture::Fixture;

/// The prefix that all of Culvert's service accounts have in their user names.
const USER_PREFIX: &str = "system:serviceaccount:kube-system:culvert-";

/// Returns all requests that Culvert's service accounts have made since the cluster started, each with the
/// account's name without [`USER_PREFIX`].
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
