//! The small case: starts and changes with a thousand Services, and the memory of an idle daemon with default
//! settings.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};
use aya::maps::MapInfo;
use tunnel_tests::{
    clock::{self, Instant},
    instance::Settings,
    load::race::offset,
    manifest::Protocol,
    node::Node,
    usage,
};

use super::{
    Options,
    probe::{self, Change, PORT},
};
use crate::{
    report::Common,
    services::{FIRST, many},
};

/// The endpoints of each Service.
const ENDPOINTS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 101)),
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 102)),
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 103)),
];

/// The time after which a daemon counts as idle.
const SETTLING: Duration = Duration::from_secs(2);

/// The measurements.
#[derive(Debug, Default)]
pub(super) struct Few {
    /// Times from the rename of the files, with the daemon running.
    pub(super) from_rename: Vec<Duration>,
    /// Times from the start of the daemon.
    pub(super) from_start: Vec<Duration>,
    /// Changes of one endpoint.
    pub(super) changes: Vec<Change>,
    /// The resident memory of idle daemons, in bytes.
    pub(super) resident: Vec<u64>,
    /// The kernel memory of their maps, in bytes.
    pub(super) maps: Vec<u64>,
}

pub(super) fn measure(options: &Options) -> Result<Few> {
    let mut few = Few::default();
    for round in 0..options.rounds.max(1) {
        let node = probe::node(settings(&options.common, options.services)?)?;
        node.start()?;
        few.from_rename.push(appear(&node, options.services)?);
        if round == 0 {
            few.changes = probe::change(&node, options.changes)?;
        }
        probe::end(&node)?;
        let from_start = probe::begin(&node, vips(options.services))?;
        few.from_start.push(from_start);
        clock::pause(SETTLING);
        let daemon = node.daemon_pid().context("the daemon doesn't run")?;
        few.resident.push(usage::resident(daemon)?);
        few.maps.push(maps(daemon, &node.bpffs())?);
    }
    Ok(few)
}

/// Returns the product's default settings, with larger maps only if the Services need them.
pub(super) fn settings(common: &Common, services: u32) -> Result<Settings> {
    let wanted = services.saturating_mul(2);
    let mut settings = common.settings()?;
    let maps = &mut settings.maps;
    maps.frontends = maps.frontends.max(wanted);
    maps.slots = maps.slots.max(wanted.saturating_mul(4));
    maps.backends = maps.backends.max(wanted.saturating_mul(4));
    Ok(settings)
}

/// Measures the time from the rename of a file with all Services until the kernel translates each of
/// them.
fn appear(node: &Node, services: u32) -> Result<Duration> {
    let files = many(services, Protocol::UDP, [PORT; 2], |_| ENDPOINTS);
    let client = node.pod("client")?;
    let start = Instant::now();
    for file in files {
        node.apply(file)?;
    }
    probe::until_all(&client, vips(services))?;
    Ok(start.elapsed())
}

fn vips(services: u32) -> impl Iterator<Item = IpAddr> {
    (0..services).map(|number| offset(FIRST, number))
}

/// Sums the kernel memory of the maps that a daemon has open or pinned, each once.
fn maps(daemon: i32, pins: &Path) -> Result<u64> {
    let mut known: BTreeMap<u32, u64> = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{daemon}/fdinfo"))? {
        // The file may have been closed since the folder was read.
        if let Ok(text) = fs::read_to_string(entry?.path()) {
            known.extend(map(&text));
        }
    }
    for folder in fs::read_dir(pins)? {
        let folder = folder?.path();
        if !folder.is_dir() || folder.ends_with("links") {
            continue;
        }
        for pin in fs::read_dir(folder)? {
            let info = MapInfo::from_pin(pin?.path())?;
            let opened = info.fd()?;
            let number = opened.as_fd().as_raw_fd();
            let text = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
            known.extend(map(&text));
        }
    }
    Ok(known.values().sum())
}

/// Parses a map's ID and its bytes from the `fdinfo` of an open file.
fn map(fdinfo: &str) -> Option<(u32, u64)> {
    let field = |name: &str| {
        let line = fdinfo.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim)
    };
    Some((
        field("map_id:")?.parse().ok()?,
        field("memlock:")?.parse().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_a_map_counts() {
        let text = "pos:\t0\nflags:\t02000002\nmap_type:\t1\nmax_entries:\t8\nmemlock:\t8192\nmap_id:\t77\n";

        assert_eq!(map(text), Some((77, 8192)));
        assert_eq!(map("pos:\t0\nprog_id:\t3\nmemlock:\t4096\n"), None);
    }
}
