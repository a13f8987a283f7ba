//! The small case: how long a daemon with a thousand Services takes to start and to apply changes, and how
//! much memory it uses when idle. The daemon has default settings.

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
    address::nth_address,
    clock::{self, Instant},
    culvert_instance::InstanceSettings,
    manifest::Protocol,
    node::Node,
    process_usage,
};

use super::{
    Options,
    probe::{self, Change, PORT},
};
use crate::{
    report::CommonOptions,
    services::{FIRST_CLUSTER_IP, service_files},
};

/// The endpoints of each Service.
const ENDPOINTS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 101)),
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 102)),
    IpAddr::V4(Ipv4Addr::new(10, 1, 0, 103)),
];

/// The time after which a daemon is considered idle.
const IDLE_AFTER: Duration = Duration::from_secs(2);

/// The measurements of the small case.
#[derive(Debug, Default)]
pub(super) struct SmallCase {
    /// The times from renaming the files, with the daemon running, until all Services are translated.
    pub(super) from_rename: Vec<Duration>,
    /// The times from starting the daemon until all Services are translated.
    pub(super) from_start: Vec<Duration>,
    /// The measured changes to one endpoint.
    pub(super) changes: Vec<Change>,
    /// Each idle daemon's resident memory, in bytes.
    pub(super) resident: Vec<u64>,
    /// The kernel memory of each of these daemons' maps, in bytes.
    pub(super) maps: Vec<u64>,
}

pub(super) fn measure(options: &Options) -> Result<SmallCase> {
    let mut measured = SmallCase::default();
    for round in 0..options.rounds.max(1) {
        let node = probe::create_node(settings(&options.common, options.services)?)?;
        node.start()?;
        measured
            .from_rename
            .push(measure_rename(&node, options.services)?);
        if round == 0 {
            measured.changes = probe::measure_changes(&node, options.changes)?;
        }
        probe::stop_and_clean_up(&node)?;
        let from_start = probe::start_daemon(&node, vips(options.services))?;
        measured.from_start.push(from_start);
        clock::pause(IDLE_AFTER);
        let daemon = node.daemon_pid().context("the daemon doesn't run")?;
        measured
            .resident
            .push(process_usage::resident_memory(daemon)?);
        measured.maps.push(map_memory(daemon, &node.bpffs())?);
    }
    Ok(measured)
}

/// Returns Culvert's default settings, with larger maps only if the Services need them.
pub(super) fn settings(common: &CommonOptions, services: u32) -> Result<InstanceSettings> {
    let wanted = services.saturating_mul(2);
    let mut settings = common.settings()?;
    let maps = &mut settings.maps;
    maps.frontends = maps.frontends.max(wanted);
    maps.slots = maps.slots.max(wanted.saturating_mul(4));
    maps.backends = maps.backends.max(wanted.saturating_mul(4));
    Ok(settings)
}

/// Measures the time from renaming the Services' files into place until all Services are translated.
fn measure_rename(node: &Node, services: u32) -> Result<Duration> {
    let files = service_files(services, Protocol::UDP, [PORT; 2], |_| ENDPOINTS);
    let client = node.pod("client")?;
    let start = Instant::now();
    for file in files {
        node.apply(file)?;
    }
    probe::wait_until_translated(&client, vips(services))?;
    Ok(start.elapsed())
}

fn vips(services: u32) -> impl Iterator<Item = IpAddr> {
    (0..services).map(|number| nth_address(FIRST_CLUSTER_IP, number))
}

/// Adds up the kernel memory of the maps that a daemon has open or has pinned, counting each map once.
fn map_memory(daemon: i32, pins: &Path) -> Result<u64> {
    let mut bytes_by_id: BTreeMap<u32, u64> = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{daemon}/fdinfo"))? {
        // The file may have been closed since the directory was read.
        if let Ok(text) = fs::read_to_string(entry?.path()) {
            bytes_by_id.extend(parse_map_info(&text));
        }
    }
    for directory in fs::read_dir(pins)? {
        let directory = directory?.path();
        if !directory.is_dir() || directory.ends_with("links") {
            continue;
        }
        for pin in fs::read_dir(directory)? {
            let info = MapInfo::from_pin(pin?.path())?;
            let opened = info.fd()?;
            let number = opened.as_fd().as_raw_fd();
            let text = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
            bytes_by_id.extend(parse_map_info(&text));
        }
    }
    Ok(bytes_by_id.values().sum())
}

/// Parses a map's ID and size in bytes from the `fdinfo` of an open file.
fn parse_map_info(fdinfo: &str) -> Option<(u32, u64)> {
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
    fn only_maps_are_counted() {
        let text = "pos:\t0\nflags:\t02000002\nmap_type:\t1\nmax_entries:\t8\nmemlock:\t8192\nmap_id:\t77\n";

        assert_eq!(parse_map_info(text), Some((77, 8192)));
        assert_eq!(
            parse_map_info("pos:\t0\nprog_id:\t3\nmemlock:\t4096\n"),
            None
        );
    }
}
