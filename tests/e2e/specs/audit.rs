//! The product's requests to the API server.

use std::{
    fs,
    io::{BufRead as _, BufReader},
};

use anyhow::Result;
use serde_json::Value;

use crate::stage::Stage;

const USER: &str = "system:serviceaccount:kube-system:culvert-";

/// Returns all requests of the product's service accounts since the cluster's start, each with the
/// suffix of the account's name.
pub(super) fn requests(stage: &Stage<'_>) -> Result<Vec<(String, Value)>> {
    let path = stage.cluster.site.logs.path("audit.jsonl");
    let mut requests = Vec::new();
    for line in BufReader::new(fs::File::open(&path)?).lines() {
        // A killed API server may have left an incomplete line.
        let Ok(request) = serde_json::from_str::<Value>(&line?) else {
            continue;
        };
        let user = request["user"]["username"].as_str().unwrap_or_default();
        if let Some(account) = user.strip_prefix(USER)
            && request["objectRef"].is_object()
        {
            requests.push((account.to_owned(), request));
        }
    }
    Ok(requests)
}
