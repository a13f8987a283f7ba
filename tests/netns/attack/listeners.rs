//! An unprivileged user listens on a Service's address that is assigned to the node.

use anyhow::{Result, ensure};

use crate::{
    fixture::Scene,
    local_listeners::{CACHED, NAME, NodeLocalCache, expect_backend, prepared, until_listener},
    support::{ensure_eq, ports, until_eq},
};

/// A user without privileges.
const USER: u32 = 1000;

/// Waits until the status names the user whose listener is ignored, for every frontend or for none of them.
fn until_ignored(scene: &Scene, user: Option<u32>) -> Result<()> {
    until_eq("users of ignored listeners", vec![user; 4], || {
        let ports = ports(&scene.node.services()?, NAME);
        let frontends = ports.iter().filter_map(|port| port["frontends"].as_array());
        let users = frontends.flatten().map(|frontend| {
            let user = frontend["ignoredListenerUser"].as_u64()?;
            u32::try_from(user).ok()
        });
        Ok(users.collect::<Vec<_>>())
    })
}

#[test]
fn a_listener_of_an_unprivileged_user_takes_no_service_over() -> Result<()> {
    let scene = prepared("")?;
    let host = scene.node.host();
    scene.node.start()?;
    expect_backend(&scene)?;

    let attacker = NodeLocalCache::of_user(host, USER)?;
    until_ignored(&scene, Some(USER))?;
    expect_backend(&scene)?;
    until_listener(&scene, false)?;
    let shown = scene.node.culvert(&["services", NAME])?.stdout;
    ensure!(
        shown.contains("; local listener of user 1000 ignored"),
        "{shown}"
    );
    ensure_eq("counted", scene.node.reason_count("listener_ignored")?, 4)?;
    let logged = scene.node.logs();
    ensure_eq(
        "logged",
        logged.matches("local listener ignored").count(),
        4,
    )?;
    ensure!(logged.contains("user=1000"), "{logged}");

    // The same listener is ignored from the first write after a restart.
    scene.node.stop()?;
    scene.node.start()?;
    expect_backend(&scene)?;
    until_ignored(&scene, Some(USER))?;

    // Root's listener takes the Service over.
    drop(attacker);
    until_ignored(&scene, None)?;
    let cache = NodeLocalCache::on(host)?;
    until_listener(&scene, true)?;
    cache.expect_all_traffic(&scene)
}

#[test]
fn a_listener_of_a_configured_user_takes_the_service_over() -> Result<()> {
    let scene = prepared("localListeners: [1000]")?;
    let host = scene.node.host();
    scene.node.start()?;

    let roots = NodeLocalCache::on(host)?;
    until_ignored(&scene, Some(0))?;
    expect_backend(&scene)?;
    drop(roots);

    let cache = NodeLocalCache::of_user(host, USER)?;
    until_listener(&scene, true)?;
    cache.expect_all_traffic(&scene)
}
