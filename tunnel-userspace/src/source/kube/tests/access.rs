//! Tests with credentials that change.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{server::kubeconfig_of, *};

/// Replaces a file atomically, as tools that renew credentials do.
fn replace(path: &Path, text: &str) {
    let draft = path.with_extension("new");
    fs::write(&draft, text).expect("written");
    fs::rename(&draft, path).expect("renamed");
}

/// Starts a server that accepts these tokens. A client that uses a token is sent the Service `a` with the
/// address that is paired with that token. The server ends watches immediately, so that requests keep coming.
fn server_accepting(tokens: &'static [(&'static str, &'static str)]) -> Server {
    Server::start(Script::all(move |request| {
        let known = tokens
            .iter()
            .find(|(token, _)| request.token.as_deref() == Some(*token));
        let Some((_, address)) = known else {
            return error_status(401, "Unauthorized");
        };
        let is_service = request.path == "/api/v1/services";
        if is_streamed(request) {
            return ScriptedResponse::Closed(vec![server::end_of_list(1)]);
        }
        if !is_watch(request) {
            return list_page(&[], 1, None);
        }
        // Each address gets a different version.
        let version = 10 + address.bytes().last().map_or(0, u64::from);
        ScriptedResponse::Closed(if is_service {
            vec![service_line("MODIFIED", "a", address, version)]
        } else {
            Vec::new()
        })
    }))
}

/// Creates a directory that contains a kubeconfig with the given user's credentials.
fn directory_of(server: &Server, user: &Value) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    replace(
        &directory.path().join("kubeconfig"),
        &kubeconfig_of(server, user),
    );
    directory
}

/// Waits until the server has received three more requests for Services.
async fn until_requested_again(server: &Server) {
    let before = server.requests("/api/v1/services").len();
    while server.requests("/api/v1/services").len() < before + 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_renewed_token_is_used_whether_the_old_one_was_accepted_or_not() {
    let both: &'static [(&str, &str)] = &[("first", "10.0.0.1"), ("second", "10.0.0.2")];
    for (tokens, is_accepted) in [(both, true), (&both[1..], false)] {
        let server = server_accepting(tokens);
        let secret = tempfile::tempdir().expect("a directory");
        let token = secret.path().join("token");
        replace(&token, "first");
        let directory = directory_of(&server, &json!({"tokenFile": token}));
        let mut source = Setup::within(directory, &[&server]).start().await;
        if is_accepted {
            source.until("a=10.0.0.1").await;
        } else {
            source.until_server_error("Unauthorized").await;
        }

        replace(&token, "second");

        source.until("a=10.0.0.2").await;
    }
}

#[tokio::test]
async fn a_credential_plugin_runs_again_when_its_token_is_refused() {
    let server = server_accepting(&[("second", "10.0.0.2")]);
    let secret = tempfile::tempdir().expect("a directory");
    let credential_file = secret.path().join("said");
    let write_credential = |token: &str| {
        let credential = json!({
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": token},
        });
        replace(&credential_file, &credential.to_string());
    };
    write_credential("first");
    let plugin = json!({
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "cat",
        "args": [credential_file],
        "interactiveMode": "Never",
    });
    let directory = directory_of(&server, &json!({"exec": plugin}));
    let mut source = Setup::within(directory, &[&server]).start().await;
    source.until_server_error("Unauthorized").await;

    write_credential("second");

    source.until("a=10.0.0.2").await;
}

#[tokio::test]
async fn a_changed_kubeconfig_is_used_unless_it_is_invalid() {
    let server = server_accepting(&[("first", "10.0.0.1"), ("second", "10.0.0.2")]);
    let directory = directory_of(&server, &json!({"token": "first"}));
    let mut source = Setup::within(directory, &[&server]).start().await;
    let kubeconfig = source.dir.path().join("kubeconfig");
    source.until("a=10.0.0.1").await;

    replace(&kubeconfig, "not a kubeconfig");
    until_requested_again(&server).await;
    let missing = json!({"client-certificate": "/nowhere/cert", "client-key": "/nowhere/key"});
    replace(&kubeconfig, &kubeconfig_of(&server, &missing));
    until_requested_again(&server).await;
    let requests = server.requests("/api/v1/services");
    assert!(
        requests
            .iter()
            .all(|request| request.token.as_deref() == Some("first"))
    );

    replace(
        &kubeconfig,
        &kubeconfig_of(&server, &json!({"token": "second"})),
    );

    source.until("a=10.0.0.2").await;
}
