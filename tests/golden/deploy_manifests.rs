//! Checks that the manifests in `deploy` are valid for Kubernetes and for this version of Culvert.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser as _;
use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::{ConfigMap, Container, Pod, PodSpec, Secret, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tunnel_userspace::{cli::Cli, config::Config, tunnel::agent};

/// The name of the image that `cargo xtask package` builds.
const IMAGE: &str = concat!("culvert.invalid/culvert:", env!("CARGO_PKG_VERSION"));

/// Returns the files with the given extension in a directory and its subdirectories.
pub(crate) fn files(directory: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, ending)?);
        } else if path.extension().is_some_and(|it| it == ending) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns the YAML files in `deploy` whose names `is_chosen` accepts, together with their contents.
fn yaml_files(is_chosen: impl Fn(&str) -> bool) -> Result<Vec<(PathBuf, String)>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy");
    let mut chosen = Vec::new();
    for path in files(Path::new(directory), "yaml")? {
        let name = path.file_name().and_then(|name| name.to_str());
        if name.is_some_and(&is_chosen) {
            let text = fs::read_to_string(&path)?;
            chosen.push((path, text));
        }
    }
    ensure!(!chosen.is_empty(), "no such YAML files in {directory}");
    Ok(chosen)
}

fn objects() -> Result<Vec<(PathBuf, Value)>> {
    let is_object = |name: &str| !["kustomization.yaml", "culvert.yaml"].contains(&name);
    let mut objects = Vec::new();
    for (path, text) in yaml_files(is_object)? {
        for document in serde_saphyr::from_multiple(&text)? {
            objects.push((path.clone(), document));
        }
    }
    Ok(objects)
}

/// Asserts that no field is lost when a value is parsed as a Kubernetes type.
fn expect_known_fields<T: DeserializeOwned + Serialize>(value: &Value) -> Result<()> {
    let object: T = serde_json::from_value(value.clone())?;
    expect_contained(value, &serde_json::to_value(object)?, "")
}

/// Asserts that `full` contains every field of `part`, with the same value.
fn expect_contained(part: &Value, full: &Value, path: &str) -> Result<()> {
    match (part, full) {
        (Value::Object(fields), Value::Object(_)) => {
            for (name, field) in fields {
                let path = format!("{path}.{name}");
                let there = full.get(name);
                let there = there.with_context(|| format!("{path} isn't a field"))?;
                expect_contained(field, there, &path)?;
            }
            Ok(())
        }
        (Value::Array(items), Value::Array(all)) if items.len() == all.len() => items
            .iter()
            .zip(all)
            .enumerate()
            .try_for_each(|(number, (item, full))| {
                expect_contained(item, full, &format!("{path}[{number}]"))
            }),
        _ => {
            ensure!(part == full, "{path} is {part}, and read as {full}");
            Ok(())
        }
    }
}

fn check(value: &Value) -> Result<()> {
    match value["kind"].as_str() {
        Some("DaemonSet") => expect_known_fields::<DaemonSet>(value),
        Some("Deployment") => expect_known_fields::<Deployment>(value),
        Some("Pod") => expect_known_fields::<Pod>(value),
        Some("ConfigMap") => expect_known_fields::<ConfigMap>(value),
        Some("Secret") => expect_known_fields::<Secret>(value),
        Some("ServiceAccount") => expect_known_fields::<ServiceAccount>(value),
        Some("ClusterRole") => expect_known_fields::<ClusterRole>(value),
        Some("ClusterRoleBinding") => expect_known_fields::<ClusterRoleBinding>(value),
        Some("Role") => expect_known_fields::<Role>(value),
        Some("RoleBinding") => expect_known_fields::<RoleBinding>(value),
        other => bail!("no check for manifests of kind {other:?}"),
    }
}

#[test]
fn kubernetes_knows_every_field_of_a_manifest() -> Result<()> {
    for (path, value) in objects()? {
        check(&value).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[test]
fn a_field_that_kubernetes_does_not_know_is_found() {
    let value = json!({
        "kind": "DaemonSet",
        "apiVersion": "apps/v1",
        "spec": { "template": { "spec": { "containers": [{ "name": "a", "imagePullpolicy": "x" }] } } },
    });

    let error = check(&value).expect_err("a typing error");

    let path = ".spec.template.spec.containers[0].imagePullpolicy isn't a field";
    assert_eq!(error.to_string(), path);
}

#[test]
fn every_config_is_valid_for_culvert() -> Result<()> {
    for (path, text) in yaml_files(|name| name == "culvert.yaml")? {
        if let Err((field, reason)) = Config::parse(&text) {
            bail!("{}: {field}: {reason}", path.display());
        }
    }
    Ok(())
}

/// Returns the pod specs of all Pods, DaemonSets and Deployments in `deploy`. Patches are left out.
fn pods() -> Result<Vec<PodSpec>> {
    let mut pods = Vec::new();
    for (_, value) in objects()? {
        let is_patch = value["spec"]["selector"].is_null();
        let spec = match value["kind"].as_str() {
            Some("DaemonSet" | "Deployment") if !is_patch => &value["spec"]["template"]["spec"],
            Some("Pod") => &value["spec"],
            _ => continue,
        };
        pods.push(serde_json::from_value(spec.clone())?);
    }
    ensure!(!pods.is_empty(), "there are no pods");
    Ok(pods)
}

/// Asserts that a container runs this version's image with a valid command line.
fn expect_culvert_command(container: &Container) -> Result<()> {
    let Container { name, image, .. } = container;
    ensure!(image.as_deref() == Some(IMAGE), "{name}: {image:?}");
    ensure!(
        container.command.is_none(),
        "{name}: must use the image's command"
    );
    let args = container.args.iter().flatten().map(String::as_str);
    Cli::try_parse_from(std::iter::once("culvert").chain(args))?;
    Ok(())
}

#[test]
fn every_container_starts_this_version_with_a_valid_command() -> Result<()> {
    for pod in pods()? {
        let mut all = pod.init_containers.iter().flatten().chain(&pod.containers);
        all.try_for_each(expect_culvert_command)?;
    }
    Ok(())
}

#[test]
fn probes_of_the_agent_use_its_admin_port() -> Result<()> {
    let agent = objects()?.into_iter().find(|(_, value)| {
        value["kind"] == "DaemonSet" && value["metadata"]["name"] == "culvert-agent"
    });
    let (_, agent) = agent.context("no DaemonSet culvert-agent")?;
    let container = &agent["spec"]["template"]["spec"]["containers"][0];
    let port = agent::AgentSettings::default().admin_address.port();
    for probe in ["livenessProbe", "readinessProbe"] {
        ensure!(container[probe]["httpGet"]["port"] == port, "{probe}");
    }
    Ok(())
}

#[test]
fn no_image_can_be_pulled_from_a_foreign_registry() -> Result<()> {
    for (path, text) in yaml_files(|name| name != "culvert.yaml")? {
        for line in text.lines() {
            let Some((_, image)) = line.split_once("image: ") else {
                continue;
            };
            let host = image.split('/').next().unwrap_or_default();
            // Nobody can register a domain below `.invalid`, because RFC 2606 reserves it.
            ensure!(host.ends_with(".invalid"), "{}: {image}", path.display());
        }
    }
    Ok(())
}

#[test]
fn pods_that_are_scheduled_go_to_nodes_that_can_run_the_image() -> Result<()> {
    for pod in pods()?.iter().filter(|pod| pod.node_name.is_none()) {
        let labels = pod.node_selector.clone().unwrap_or_default();
        for (label, value) in [
            ("kubernetes.io/os", "linux"),
            ("kubernetes.io/arch", "amd64"),
        ] {
            let is_there = labels.get(label).is_some_and(|found| found == value);
            ensure!(is_there, "{label} of {:?}", pod.service_account_name);
        }
    }
    Ok(())
}

/// Returns the node selector terms in a file.
fn terms(file: &str) -> Result<Value> {
    let mut objects = objects()?.into_iter();
    let object = objects.find(|(path, _)| path.ends_with(file));
    let (_, object) = object.context("deploy has no such file")?;
    let affinity = &object["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
    Ok(affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"].clone())
}

#[test]
fn no_node_can_make_itself_a_gateway_and_every_node_has_one_daemon() -> Result<()> {
    const ROLE: &str = "node-role.kubernetes.io/control-plane";
    const LABEL: &str = "node-restriction.kubernetes.io/culvert-gateway";
    let role = |operator: &str| json!({ "key": ROLE, "operator": operator });
    let label = |operator: &str| json!({ "key": LABEL, "operator": operator, "values": ["true"] });
    let term = |expressions: &[Value]| json!({ "matchExpressions": expressions });

    // Gateways and controllers select nodes with either label, and the other nodes are those with neither. A kubelet
    // can't set the second label: of the labels below kubernetes.io, a kubelet may set only those below
    // kubelet.kubernetes.io and node.kubernetes.io (KEP-279).
    let cloud = Value::from_iter([term(&[role("Exists")]), term(&[label("In")])]);
    ensure!(terms("tunnel/cloud/node.yaml")? == cloud);
    ensure!(terms("controller/controller.yaml")? == cloud);
    let others = term(&[role("DoesNotExist"), label("NotIn")]);
    ensure!(terms("tunnel/others/node.yaml")? == Value::from_iter([others]));
    Ok(())
}

#[test]
fn the_install_page_has_the_required_flags_of_the_api_server() {
    let page = include_str!("../../docs/install.md");

    for flag in [
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-admission-plugins=NodeRestriction",
    ] {
        assert!(page.contains(flag), "{flag}");
    }
}

#[test]
fn only_init_containers_are_privileged() -> Result<()> {
    for pod in pods()? {
        for container in &pod.containers {
            let name = &container.name;
            let rights = container.security_context.as_ref();
            let rights = rights.with_context(|| format!("{name}: no securityContext"))?;
            ensure!(rights.privileged != Some(true), "{name}");
            ensure!(rights.allow_privilege_escalation == Some(false), "{name}");
            ensure!(rights.read_only_root_filesystem == Some(true), "{name}");
            let drop = rights.capabilities.as_ref().and_then(|it| it.drop.as_ref());
            ensure!(drop.is_some_and(|drop| drop == &["ALL"]), "{name}");
        }
    }
    Ok(())
}

/// Returns the value that a component's JSON patches add at a path.
fn added(component: &str, path: &str) -> Result<Value> {
    let file = format!(
        "{}/../deploy/{component}/kustomization.yaml",
        env!("CARGO_MANIFEST_DIR")
    );
    let value: Value = serde_saphyr::from_str(&fs::read_to_string(file)?)?;
    let patches = value["patches"].as_array().into_iter().flatten();
    for patch in patches.filter_map(|patch| patch["patch"].as_str()) {
        let steps: Value = serde_saphyr::from_str(patch)?;
        let mut steps = steps.as_array().into_iter().flatten();
        if let Some(step) = steps.find(|step| step["op"] == "add" && step["path"] == path) {
            return Ok(step["value"].clone());
        }
    }
    bail!("{component} adds nothing at {path}")
}

#[test]
fn the_socket_helper_has_a_valid_command_and_the_mounts_that_it_shares_with_the_daemon()
-> Result<()> {
    let value = added("sockets", "/spec/template/spec/containers/-")?;
    expect_known_fields::<Container>(&value)?;
    ensure!(added("sockets", "/spec/template/spec/hostPID")? == true);
    let helper: Container = serde_json::from_value(value)?;
    expect_culvert_command(&helper)?;
    let rights = helper
        .security_context
        .as_ref()
        .context("the helper has no securityContext")?;
    ensure!(rights.privileged != Some(true));
    ensure!(rights.read_only_root_filesystem == Some(true));

    // The helper needs the maps, the daemon's socket, and the config that contains the paths of both.
    let mounts = |container: &Container| {
        let mounts = container.volume_mounts.iter().flatten();
        let places = mounts.map(|mount| (mount.name.clone(), mount.mount_path.clone()));
        places.collect::<std::collections::BTreeSet<_>>()
    };
    let is_daemon = |container: &&Container| container.name == "culvert";
    let pods = pods()?;
    let daemon = pods.iter().flat_map(|pod| &pod.containers).find(is_daemon);
    let of_daemon = mounts(daemon.context("no container culvert")?);
    ensure!(mounts(&helper).is_subset(&of_daemon), "{of_daemon:?}");
    for name in ["config", "state", "bpffs"] {
        let has = mounts(&helper).iter().any(|(mounted, _)| mounted == name);
        ensure!(has, "{name} is not mounted");
    }
    Ok(())
}

/// Returns the service accounts bound to a Role or ClusterRole.
fn accounts_of(kind: &str, role: &str) -> Result<Vec<String>> {
    let mut accounts = Vec::new();
    for (_, value) in objects()? {
        let subjects = value["subjects"].as_array().into_iter().flatten();
        let names = subjects.filter_map(|subject| subject["name"].as_str());
        let of = &value["roleRef"];
        let is_of_role = of["kind"] == kind && of["name"] == role;
        accounts.extend(names.filter(|_| is_of_role).map(str::to_owned));
    }
    accounts.sort();
    Ok(accounts)
}

/// Returns the service accounts used by DaemonSets and Deployments, and by patches for them.
fn accounts_of_daemons() -> Result<Vec<String>> {
    let mut accounts = Vec::new();
    for (_, value) in objects()? {
        let account = value["spec"]["template"]["spec"]["serviceAccountName"].as_str();
        accounts.extend(account.map(str::to_owned));
    }
    accounts.sort();
    Ok(accounts)
}

#[test]
fn each_daemon_has_an_account_of_its_own_with_the_rights_that_it_uses() -> Result<()> {
    let nodes = ["culvert-cloud", "culvert-node"];

    let all = [
        "culvert-agent",
        "culvert-cloud",
        "culvert-controller",
        "culvert-node",
    ];
    ensure!(accounts_of_daemons()? == all);
    ensure!(accounts_of("ClusterRole", "culvert-node")? == nodes);
    let requesters = ["culvert-agent", "culvert-cloud"];
    ensure!(accounts_of("ClusterRole", "culvert-certificate-requester")? == requesters);
    for kind in ["ClusterRole", "Role"] {
        ensure!(accounts_of(kind, "culvert-controller")? == ["culvert-controller"]);
    }
    // Only nodes that steer read the ConfigMap that lists additional kubelet ports.
    ensure!(accounts_of("Role", "culvert-cloud")? == ["culvert-cloud"]);
    Ok(())
}
