//! Finds processes that have maps open. Processes in other PID namespaces can't be seen.

use std::{collections::BTreeSet, fs};

/// Returns a process, other than this one, that has one of these maps open, from `/proc/<pid>/fdinfo`.
pub(super) fn process_with_map(ids: &BTreeSet<u32>) -> Option<u32> {
    let own = std::process::id();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| *pid != own && has_map_open(*pid, ids))
}

fn has_map_open(pid: u32, ids: &BTreeSet<u32>) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"));
    entries.into_iter().flatten().flatten().any(|entry| {
        let is_map = fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().contains("bpf-map"));
        let number = entry.file_name();
        let path = format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy());
        let read = |path: String| fs::read_to_string(path).unwrap_or_default();
        is_map && map_id_in(&read(path)).is_some_and(|id| ids.contains(&id))
    })
}

/// Returns the map's number from the text of `/proc/<pid>/fdinfo/<fd>`.
fn map_id_in(text: &str) -> Option<u32> {
    let id = text.lines().find_map(|line| line.strip_prefix("map_id:"));
    id?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_an_open_map_is_found() {
        let text =
            "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nmap_type:\t2\nmap_id:\t4711\nfrozen:\t0\n";

        assert_eq!(map_id_in(text), Some(4711));
        assert_eq!(map_id_in("pos:\t0\n"), None);
    }
}
