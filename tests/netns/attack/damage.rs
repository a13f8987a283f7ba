//! Programs are detached, pins are removed, and file systems are mounted over them, while clients connect.

#![expect(
    clippy::print_stdout,
    reason = "prints how long each repair took, and how many connections failed meanwhile"
)]

use std::{
    fs, io,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::mount::{MsFlags, mount, umount};
use tunnel_tests::{admin, clock::Instant, culvert_instance::Instance, wait};
use tunnel_userspace::bpf::{self, detach_pinned_link};

use crate::{
    fixture::{Scene, WEB},
    programs::Programs,
    support::{CHANGE_TIMEOUT, Dialer, HTTP, ensure_eq, in_mount_namespace, maps_directory},
};

/// The time limit for the daemon to repair damage, or to report it.
const LIMIT: Duration = Duration::from_secs(5);

/// The effect of a kind of damage on the clients, and the reaction of the daemon.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Effect {
    /// No connection fails, and the daemon restores what is missing.
    Harmless,
    /// Connections fail until the daemon restores what is missing.
    Repaired,
    /// No connection fails, but the node isn't ready, and a reason contains this text. It becomes ready after the
    /// damage has been undone.
    Reported(&'static str),
}

/// A kind of damage.
struct Damage {
    name: &'static str,
    effect: Effect,
    make: fn(&Scene) -> Result<()>,
    undo: fn(&Scene) -> Result<()>,
}

const fn damage(name: &'static str, effect: Effect, make: fn(&Scene) -> Result<()>) -> Damage {
    Damage {
        name,
        effect,
        make,
        undo: |_| Ok(()),
    }
}

const DAMAGES: [Damage; 13] = [
    damage("one link's pin removed", Effect::Harmless, |scene| {
        Ok(fs::remove_file(scene.node.bpffs().join("links/connect4"))?)
    }),
    damage("all links' pins removed", Effect::Harmless, |scene| {
        Ok(fs::remove_dir_all(scene.node.bpffs().join("links"))?)
    }),
    damage("one map's pin removed", Effect::Harmless, |scene| {
        let pin = maps_directory("/services");
        Ok(fs::remove_file(scene.node.bpffs().join(pin))?)
    }),
    damage("all maps' pins removed", Effect::Harmless, |scene| {
        let maps = maps_directory("");
        remove_pins(&scene.node.bpffs().join(maps))
    }),
    damage("the pin directory removed", Effect::Harmless, |scene| {
        remove_pins(&scene.node.bpffs())
    }),
    damage("a pin replaced by another's", Effect::Harmless, |scene| {
        let links = scene.node.bpffs().join("links");
        fs::remove_file(links.join("connect4"))?;
        Ok(fs::hard_link(
            links.join("connect6"),
            links.join("connect4"),
        )?)
    }),
    damage("one program detached", Effect::Repaired, |scene| {
        detach(scene, &["connect4"])
    }),
    damage("all programs detached", Effect::Repaired, |scene| {
        let links = fs::read_dir(scene.node.bpffs().join("links"))?;
        let names = links.map(|link| Ok(link?.file_name().to_string_lossy().into_owned()));
        let mut names: Vec<String> = names.collect::<Result<_>>()?;
        // Without tcx, the programs on uplinks have no links.
        names.retain(|name| !name.contains('-'));
        detach(scene, &names)
    }),
    damage(
        "a program detached and its pin removed",
        Effect::Repaired,
        |scene| {
            detach(scene, &["connect6"])?;
            Ok(fs::remove_file(scene.node.bpffs().join("links/connect6"))?)
        },
    ),
    damage(
        "another file system mounted in place of the pins",
        Effect::Harmless,
        |scene| mount_over_pins(scene, "bpf"),
    ),
    Damage {
        name: "a directory in place of a pin",
        effect: Effect::Reported("cannot pin"),
        make: |scene| {
            let pin = scene.node.bpffs().join("links/connect4");
            fs::remove_file(&pin)?;
            Ok(fs::create_dir(&pin)?)
        },
        undo: |scene| Ok(fs::remove_dir(scene.node.bpffs().join("links/connect4"))?),
    },
    Damage {
        name: "no BPF file system at the pins",
        effect: Effect::Reported("not on a BPF file system"),
        make: |scene| mount_over_pins(scene, "tmpfs"),
        undo: |scene| at_mount_of_pins(scene, |point| Ok(umount(point)?)),
    },
    Damage {
        name: "another Culvert's programs on the cgroup",
        effect: Effect::Reported("another Culvert has programs on cgroup"),
        make: |scene| attach_other_programs(scene, &scene.node.bpffs().with_file_name("other")),
        undo: |scene| {
            let other = scene.node.bpffs().with_file_name("other");
            for link in fs::read_dir(other.join("links"))? {
                detach_pinned_link(&link?.path())?;
            }
            Ok(fs::remove_dir_all(other)?)
        },
    },
];

/// Mounts a new file system over the one that the pins are on, as the daemon sees it.
fn mount_over_pins(scene: &Scene, kind: &str) -> Result<()> {
    at_mount_of_pins(scene, |point| {
        let options = Some("mode=700");
        Ok(mount(
            Some(kind),
            point,
            Some(kind),
            MsFlags::empty(),
            options,
        )?)
    })
}

/// Calls `change` in the daemon's mount namespace, with the mount point of the pins.
fn at_mount_of_pins(scene: &Scene, change: impl FnOnce(&Path) -> Result<()> + Send) -> Result<()> {
    let pins = scene.node.bpffs_inside();
    let point = pins.parent().context("a mount point")?;
    in_mount_namespace(scene.node.host(), || change(point))
}

fn detach<A: AsRef<str>>(scene: &Scene, names: &[A]) -> Result<()> {
    let links = scene.node.bpffs().join("links");
    for name in names {
        detach_pinned_link(&links.join(name.as_ref())).with_context(|| name.as_ref().to_owned())?;
    }
    Ok(())
}

/// Attaches a second set of programs, whose maps are empty, to the node's cgroup.
fn attach_other_programs(scene: &Scene, pins: &Path) -> Result<()> {
    let programs = Programs::load_in(pins, bpf::probe()?, 64)?.0;
    programs.attach(&scene.node)
}

/// A client that connects again and again, and counts.
#[derive(Default)]
struct Clients {
    connects: AtomicU64,
    failed: AtomicU64,
    stop: AtomicBool,
}

impl Clients {
    fn run(&self, scene: &Scene, dialer: Dialer) {
        while !self.stop.load(Ordering::Relaxed) {
            let is_served = dialer
                .expect_served(&scene.client, WEB, HTTP, "backend")
                .is_ok();
            let counter = if is_served {
                &self.connects
            } else {
                &self.failed
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Waits until no connection has failed for a while.
    fn wait_for_recovery(&self) -> Result<()> {
        wait::until(LIMIT, || self.expect_connects().is_ok())
    }

    /// Waits until both clients have connected without a failure since `failed` was read.
    fn expect_connects(&self) -> Result<()> {
        let (failed, connects) = (self.failed(), self.connects.load(Ordering::Relaxed));
        wait::until(LIMIT, || {
            self.connects.load(Ordering::Relaxed) > connects + 10
        })?;
        ensure_eq("failed connects", self.failed(), failed)
    }
}

fn restored(node: &Instance) -> u64 {
    node.reason_count("program_restored").unwrap_or(0)
}

/// Returns the reasons why the node is not ready, or an empty text.
fn not_ready(node: &Instance) -> String {
    let answer = admin::get(&node.admin_socket(), "/readyz");
    answer.map_or_else(
        |error| error.to_string(),
        |answer| {
            if answer.status == 200 {
                String::new()
            } else {
                answer.body
            }
        },
    )
}

/// Removes a directory of pins, to which the daemon may be adding pins at the same time.
fn remove_pins(directory: &Path) -> Result<()> {
    loop {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            other => return Ok(other?),
        }
    }
}

fn inflict(scene: &Scene, clients: &Clients, damage: &Damage) -> Result<()> {
    let node = &scene.node;
    let (failed, before) = (clients.failed(), restored(node));
    let start = Instant::now();
    (damage.make)(scene)?;
    if let Effect::Reported(text) = damage.effect {
        wait::until(LIMIT, || not_ready(node).contains(text))
            .with_context(|| format!("/readyz says: {}", not_ready(node)))?;
        let status = node.culvert(&["status"])?;
        ensure!(status.stdout.contains(text), "{}", status.stdout);
        clients.expect_connects()?;
        (damage.undo)(scene)?;
        wait::until(LIMIT, || not_ready(node).is_empty())
            .with_context(|| format!("/readyz says: {}", not_ready(node)))?;
    } else {
        wait::until(LIMIT, || restored(node) > before).context("nothing was restored")?;
    }
    if damage.effect == Effect::Repaired {
        // A check that began before the damage was complete restores only a part of it.
        clients.wait_for_recovery()?;
    }
    let took = start.elapsed();
    clients.expect_connects()?;
    let failed = clients.failed() - failed;
    println!(
        "{}: {} ms, {failed} failed connects",
        damage.name,
        took.as_millis()
    );
    if damage.effect != Effect::Repaired {
        ensure_eq("failed connects", failed, 0)?;
    }
    // A daemon that starts now must find all pins: those at the cgroup, and two on the uplink.
    let links = || fs::read_dir(node.bpffs().join("links")).map_or(0, Iterator::count);
    wait::until(CHANGE_TIMEOUT, || links() == 11).with_context(|| format!("{} links", links()))?;
    wait::until(CHANGE_TIMEOUT, || not_ready(node).is_empty())
        .with_context(|| format!("not ready: {}", not_ready(node)))
}

/// Starts a node whose daemon checks its programs often, so that the test takes less time.
fn start() -> Result<Scene> {
    let scene = Scene::with(&["backend"], |settings| {
        settings.test_connections = Some("2500ms");
    })?;
    scene.apply_web(&["backend"])?;
    scene.configure_bpf("checkInterval: 500ms")?;
    scene.node.start()?;
    Ok(scene)
}

#[test]
fn damage_is_repaired_or_reported_in_time() -> Result<()> {
    let scene = start()?;
    let clients = Clients::default();

    thread::scope(|scope| {
        for dialer in [Dialer::V4, Dialer::V6] {
            let (clients, scene) = (&clients, &scene);
            scope.spawn(move || clients.run(scene, dialer));
        }
        let all = || -> Result<()> {
            clients.expect_connects()?;
            for damage in &DAMAGES {
                inflict(&scene, &clients, damage).context(damage.name)?;
            }
            Ok(())
        };
        let result = all();
        clients.stop.store(true, Ordering::Relaxed);
        result
    })?;

    // All of the repaired pins are those of the attached programs.
    scene.node.restart()?;
    ensure!(scene.node.logs().contains("new=0 replaced=9"));
    scene.expect_served(WEB, "backend")
}
