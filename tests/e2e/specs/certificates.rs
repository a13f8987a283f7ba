//! Checks that certificates are requested, renewed and revoked with nobody's help, and that open commands on an edge node don't
//! notice their renewal.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tunnel_cluster::node::Node;
use tunnel_tests::{clock::pause, sandbox::Process, wait};

use super::{controller, edge_commands::on_edge};
use crate::{
    fixture::{Fixture, client_pod},
    manifests::NAMESPACE,
};

/// The time limit for a request to be answered, a session to be established, and a pod to be replaced.
const TIMEOUT: Duration = Duration::from_secs(90);
/// The number of renewals of each end's certificate, and the time limit for them.
const RENEWALS: usize = 5;
const RENEWALS_TIMEOUT: Duration = Duration::from_secs(200);
/// The time without controllers. It is longer than the overlap of CAs, and the kubelets copy trusted CAs to the pods within less.
const OUTAGE: Duration = Duration::from_secs(60);
/// The time limit for a change of the CA to reach a session: an agent renews its sessions within a minute.
const RENEWED: Duration = Duration::from_secs(120);

/// The user names of the accounts that request certificates.
const REQUESTERS: [&str; 2] = [
    "system:serviceaccount:kube-system:culvert-agent",
    "system:serviceaccount:kube-system:culvert-cloud",
];

/// The name of a ConfigMap, and the section `controller` in it.
const SHORT: (&str, &str) = ("culvert-controller-short", "{ life: 20s, overlap: 30s }");
const LASTING: (&str, &str) = ("culvert-controller-lasting", "{ life: 3m, overlap: 30s }");

pub(super) fn are_renewed_under_open_commands(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |name| {
        controller::configure(fixture, SHORT.0, SHORT.1)?;
        let renewed = renew_five_times(fixture, name);
        controller::configure(fixture, LASTING.0, LASTING.1)?;
        // The next certificates are requested now, not when those of 20 s are nearly over.
        forget_certificates(ends(fixture)?)?;
        let lasting = || certificates_last(fixture).unwrap_or(false);
        let lasting = wait::until(TIMEOUT, lasting);
        renewed?;
        lasting.context("the certificates still live for 20 s")
    })
}

fn renew_five_times(fixture: &Fixture<'_>, name: &str) -> Result<()> {
    let [cloud, edge] = ends(fixture)?;
    // Both ends begin again with a certificate that lives for 20 s.
    forget_certificates([cloud, edge])?;
    edge.kill("culvert", "agent")?;
    cloud.kill("culvert", "node")?;
    wait::until(TIMEOUT, || fixture.exec(name, &["true"]).is_ok())
        .context("the edge node is not reached with new certificates")?;
    let commands = OpenCommands::start(fixture, name, "renewals")?;
    let before = issued(fixture)?;
    let mut sessions = BTreeSet::new();
    let are_renewed = || {
        sessions.extend(session_names(cloud).unwrap_or_default());
        let now = issued(fixture).unwrap_or_default();
        let mut counts = now.iter().zip(before);
        // Each of the agent's two connections has had a session more for each renewal.
        counts.all(|(now, before)| *now >= before + RENEWALS) && sessions.len() > 2 * RENEWALS
    };
    let renewed = wait::until(RENEWALS_TIMEOUT, are_renewed);
    renewed.with_context(|| {
        format!(
            "issued {before:?}, now {:?}; sessions: {sessions:?}",
            issued(fixture)
        )
    })?;
    commands.check()
}

pub(super) fn survive_controllers_and_a_ca(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |name| {
        let [cloud, edge] = ends(fixture)?;
        let commands = OpenCommands::start(fixture, name, "outage")?;
        let old = issuers(cloud)?;
        controller::renew_ca(fixture)?;
        wait::until(TIMEOUT, || {
            trusted_cas(fixture).is_ok_and(|count| count > 1)
        })
        .context("the next CA is not published")?;
        // The overlap ends while there is no controller.
        controller::scale(fixture, 0)?;
        pause(OUTAGE);
        let checked = commands.check();
        controller::scale(fixture, controller::REPLICAS)?;
        checked?;
        let signs = || has_next_ca(fixture).is_ok_and(|has_next| !has_next);
        wait::until(TIMEOUT, signs).context("the next CA does not sign")?;
        // Both ends request another certificate, which the next CA signs.
        forget_certificates([cloud, edge])?;
        let is_new = || issuers(cloud).is_ok_and(|now| now.is_disjoint(&old));
        wait::until(RENEWED, is_new)
            .with_context(|| format!("issued by {old:?}, now {:?}", issuers(cloud)))?;
        commands.check()
    })
}

pub(super) fn end_with_their_node(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |name| {
        let [cloud, _] = ends(fixture)?;
        let kubectl = fixture.kubectl();
        let mut object = kubectl.get(&["node", name])?;
        let metadata = object["metadata"].as_object_mut().context("no metadata")?;
        for field in [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "managedFields",
        ] {
            metadata.remove(field);
        }
        kubectl.run(&["delete", "node", name])?;
        let has_ended = || session_names(cloud).is_ok_and(|sessions| sessions.is_empty());
        let ended = wait::until(Duration::from_secs(15), has_ended);
        kubectl.apply(&object.to_string())?;
        kubectl.wait_for("node", name, "Ready", TIMEOUT)?;
        ended.context("the sessions of a deleted Node go on")
    })
}

pub(super) fn are_given_to_a_node_that_joins(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |name| {
        let [_, edge] = ends(fixture)?;
        let kubectl = fixture.kubectl();
        let uid = kubectl.run(&["get", "node", name, "-o", "jsonpath={.metadata.uid}"])?;
        let before: BTreeSet<String> = requests(fixture)?.iter().map(name_of).collect();
        fs::remove_dir_all(edge.agent_state_directory().join("identity"))?;
        let label = "app.kubernetes.io/name=culvert-agent";
        kubectl.run(&["-n", "kube-system", "delete", "pod", "-l", label])?;
        let is_issued = || {
            requests(fixture).is_ok_and(|all| {
                all.iter().any(|it| {
                    let bound = &it["spec"]["extra"]["authentication.kubernetes.io/node-uid"][0];
                    let is_new = !before.contains(&name_of(it));
                    is_new && bound == &uid && !it["status"]["certificate"].is_null()
                })
            })
        };
        wait::until(TIMEOUT, is_issued).context("the Node gets no certificate")?;
        wait::until(TIMEOUT, || fixture.exec(name, &["true"]).is_ok())
            .context("the Node is not reached")
    })
}

/// Labels a node by the credentials of its kubelet, as far as the API server permits.
pub(super) fn gateways_need_labels_that_a_kubelet_cannot_set(fixture: &Fixture<'_>) -> Result<()> {
    let [_, edge] = ends(fixture)?;
    let name = edge.name;
    let user = format!("--as=system:node:{name}");
    let label = |label: &str| {
        let groups = ["--as-group=system:nodes", "--as-group=system:authenticated"];
        let arguments = ["label", "--overwrite", "node", name, label, &user];
        fixture.kubectl().run(&[&arguments[..], &groups].concat())
    };
    for reserved in [
        "node-restriction.kubernetes.io/culvert-gateway=true",
        "node-role.kubernetes.io/control-plane=true",
    ] {
        ensure!(label(reserved).is_err(), "the kubelet may set {reserved}");
    }
    let own = [
        "openyurt.io/is-edge-worker",
        "culvert.dev/culvert-gateway",
        "node.kubernetes.io/culvert-gateway",
    ];
    for key in own {
        label(&format!("{key}=true"))?;
    }
    // The controller of DaemonSets reacts within a second.
    pause(Duration::from_secs(5));
    let path = "jsonpath={.items[*].spec.nodeName}";
    let arguments = ["-n", "kube-system", "get", "pods", "-o", path, "-l"];
    let nodes_of = |app: &str| {
        let selector = format!("app.kubernetes.io/name={app}");
        fixture
            .kubectl()
            .run(&[&arguments[..], &[&selector]].concat())
    };
    let pods = ["culvert-cloud", "culvert-controller"].map(nodes_of);
    for key in &own[1..] {
        label(&format!("{key}-"))?;
    }
    for nodes in pods {
        let nodes = nodes?;
        ensure!(!nodes.split(' ').any(|node| node == name), "{nodes}");
    }
    Ok(())
}

/// Returns the node with the gateway, and the edge node.
fn ends<'a>(fixture: &Fixture<'a>) -> Result<[&'a Node; 2]> {
    let nodes = &fixture.cluster.nodes;
    let cloud = nodes.first().context("the cluster has no node")?;
    let edge = nodes.iter().find(|node| node.is_edge());
    Ok([cloud, edge.context("the cluster has no edge node")?])
}

/// Removes the certificates of both ends. They go on to use them, and request others.
fn forget_certificates([cloud, edge]: [&Node; 2]) -> Result<()> {
    for directory in [cloud.state_directory(), edge.agent_state_directory()] {
        fs::remove_file(directory.join("identity/cert-and-key.pem"))?;
    }
    Ok(())
}

/// Returns all requests for certificates.
fn requests(fixture: &Fixture<'_>) -> Result<Vec<Value>> {
    let mut list = fixture.kubectl().get(&["csr"])?;
    Ok(list["items"]
        .as_array_mut()
        .map(std::mem::take)
        .unwrap_or_default())
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].to_string()
}

/// Returns how many certificates each of [`REQUESTERS`] has got.
fn issued(fixture: &Fixture<'_>) -> Result<[usize; 2]> {
    let all = requests(fixture)?;
    Ok(REQUESTERS.map(|requester| {
        let has_issued = |it: &&Value| {
            it["spec"]["username"] == requester && !it["status"]["certificate"].is_null()
        };
        all.iter().filter(has_issued).count()
    }))
}

/// Returns how many CAs are trusted.
fn trusted_cas(fixture: &Fixture<'_>) -> Result<usize> {
    let path = r"jsonpath={.data.ca\.pem}";
    let arguments = [
        "-n",
        "kube-system",
        "get",
        "configmap",
        "culvert-ca",
        "-o",
        path,
    ];
    let text = fixture.kubectl().run(&arguments)?;
    Ok(text.matches("BEGIN CERTIFICATE").count())
}

/// Returns true while there is a CA that does not sign yet.
fn has_next_ca(fixture: &Fixture<'_>) -> Result<bool> {
    let secret = fixture
        .kubectl()
        .get(&["-n", "kube-system", "secret", "culvert-ca"])?;
    Ok(secret["data"].get("next-ca.pem").is_some())
}

/// Returns the sessions of the gateway.
fn sessions(cloud: &Node) -> Result<Vec<Value>> {
    let nodes: Value = serde_json::from_str(&cloud.get_from_daemon("/nodes")?.body)?;
    let nodes = nodes.as_array().context("no list of nodes")?;
    let sessions = nodes.iter().filter_map(|node| node["sessions"].as_array());
    Ok(sessions.flatten().cloned().collect())
}

fn session_names(cloud: &Node) -> Result<BTreeSet<String>> {
    let sessions = sessions(cloud)?;
    Ok(sessions.iter().map(|it| it["name"].to_string()).collect())
}

/// Returns the names of the CAs that have issued the certificates of the gateway and of its sessions.
fn issuers(cloud: &Node) -> Result<BTreeSet<String>> {
    let status: Value = serde_json::from_str(&cloud.get_from_daemon("/status")?.body)?;
    let own = status["identity"]["issuer"].to_string();
    let sessions = sessions(cloud)?;
    let of_sessions = sessions
        .iter()
        .map(|it| it["certificateIssuer"].to_string());
    Ok(of_sessions.chain([own]).collect())
}

const MINUTE: SignedDuration = SignedDuration::from_mins(1);

/// Returns true if the certificates of both ends are valid for more than a minute.
fn certificates_last(fixture: &Fixture<'_>) -> Result<bool> {
    let [cloud, _] = ends(fixture)?;
    let lasts = |expires: &Value| {
        let expires = expires
            .as_str()
            .and_then(|text| text.parse::<Timestamp>().ok());
        expires.is_some_and(|expires| expires.duration_since(Timestamp::now()) > MINUTE)
    };
    let status: Value = serde_json::from_str(&cloud.get_from_daemon("/status")?.body)?;
    let sessions = sessions(cloud)?;
    let are_lasting = sessions
        .iter()
        .all(|session| lasts(&session["certificateExpires"]));
    Ok(are_lasting && !sessions.is_empty() && lasts(&status["identity"]["expires"]))
}

/// Commands that are open on the edge node: a shell that counts on its output and in the log of its pod, and `kubectl logs`.
struct OpenCommands {
    processes: [(&'static str, Process); 2],
    outputs: [PathBuf; 2],
    name: &'static str,
}

impl OpenCommands {
    fn start(fixture: &Fixture<'_>, node: &str, name: &'static str) -> Result<Self> {
        let directory = fixture.cluster.shared.lab.directory();
        let outputs = ["logs", "exec"].map(|command| directory.join(format!("{name}-{command}")));
        let pod = client_pod(node);
        // The first process of the container writes to the pod's log.
        let script = format!(
            "n=0; while true; do n=$((n+1)); echo $$ $n; echo {name} $n > /proc/1/fd/1; sleep 0.2; done"
        );
        let logs = ["-n", NAMESPACE, "logs", "--follow", &pod];
        let exec = ["-n", NAMESPACE, "exec", &pod, "--", "sh", "-c", &script];
        let start = |arguments: &[&str], output| {
            fixture
                .kubectl()
                .start_with_output(arguments, File::create(output)?)
        };
        let logs = start(&logs, &outputs[0])?;
        let exec = start(&exec, &outputs[1])?;
        let commands = Self {
            processes: [("logs", logs), ("exec", exec)],
            outputs,
            name,
        };
        wait::until(TIMEOUT, || {
            commands
                .lines()
                .is_ok_and(|lines| lines.iter().all(|it| it.len() > 2))
        })
        .context("the commands print nothing")?;
        Ok(commands)
    }

    /// Returns the complete lines of the commands, each without the text before its number.
    fn lines(&self) -> Result<[Vec<(String, usize)>; 2]> {
        let [logs, exec] = self.outputs.each_ref().map(fs::read_to_string);
        let parse = |text: &str| -> Vec<(String, usize)> {
            let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
            let numbered = complete.lines().filter_map(|line| line.split_once(' '));
            let numbered =
                numbered.map(|(name, number)| (name.to_owned(), number.parse().unwrap_or(0)));
            numbered.collect()
        };
        let mut logs = parse(&logs?);
        logs.retain(|(name, _)| name == self.name);
        Ok([logs, parse(&exec?)])
    }

    /// Expects both commands to run, to have printed each number once, and the shell to be the same process.
    fn check(&self) -> Result<()> {
        let before = self.lines()?.map(|lines| lines.len());
        let grows = || {
            let now = self.lines().map(|lines| lines.map(|it| it.len()));
            now.is_ok_and(|now| now.iter().zip(before).all(|(now, before)| *now > before))
        };
        wait::until(Duration::from_secs(10), grows)
            .with_context(|| format!("the commands print nothing more; lines: {before:?}"))?;
        for (command, process) in &self.processes {
            ensure!(
                process.try_wait()?.is_none(),
                "`kubectl {command}` has exited"
            );
        }
        for lines in self.lines()? {
            let (first, _) = lines.first().context("no lines")?;
            for (expected, (name, number)) in (1..).zip(&lines) {
                ensure!(
                    name == first && *number == expected,
                    "line {expected} of {first} is {name} {number}"
                );
            }
        }
        Ok(())
    }
}
