//! Writes the kernel's settings of connection tracking that the config contains.

use std::{fs, io, path::Path};

use crate::config::ConntrackConfig;

/// The directory of the settings. It is absent if the kernel doesn't track connections.
const DIRECTORY: &str = "/proc/sys/net/netfilter";
/// The number of buckets in the kernel's table of connections.
const BUCKETS: &str = "/sys/module/nf_conntrack/parameters/hashsize";

/// Writes the settings. Returns a line of text about each that has changed or can't be changed.
pub(super) fn write(config: &ConntrackConfig) -> Vec<String> {
    write_to(config, Path::new(DIRECTORY), Path::new(BUCKETS))
}

fn write_to(config: &ConntrackConfig, directory: &Path, buckets: &Path) -> Vec<String> {
    let mut settings = config.settings().peekable();
    if settings.peek().is_some() && !directory.join("nf_conntrack_max").exists() {
        return vec![
            "left the settings of connection tracking alone, since nf_conntrack is not loaded"
                .to_owned(),
        ];
    }
    let mut lines: Vec<String> = settings
        .filter_map(|(name, value)| {
            let line = change(&directory.join(name), |_| Some(value));
            describe(&format!("net.netfilter.{name}"), line)
        })
        .collect();
    // As in kube-proxy, there are at most four connections for each bucket.
    let wanted = u64::from(config.max / 4);
    if wanted != 0 {
        let line = change(buckets, |current| (current < wanted).then_some(wanted));
        lines.extend(describe("the buckets of nf_conntrack", line));
    }
    lines
}

/// Changes a setting, if it has another value than wanted. Returns the old and the new value if it was changed.
fn change(path: &Path, wanted: impl FnOnce(u64) -> Option<u64>) -> io::Result<Option<[u64; 2]>> {
    let text = fs::read_to_string(path)?;
    let current = text.trim().parse().map_err(io::Error::other)?;
    let Some(new) = wanted(current).filter(|new| *new != current) else {
        return Ok(None);
    };
    fs::write(path, new.to_string())?;
    Ok(Some([current, new]))
}

fn describe(name: &str, result: io::Result<Option<[u64; 2]>>) -> Option<String> {
    match result {
        Ok(None) => None,
        Ok(Some([old, new])) => Some(format!("set {name} to {new}, which was {old}")),
        // As with kube-proxy, the node works without it.
        Err(error) => Some(format!("cannot set {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn config() -> ConntrackConfig {
        ConntrackConfig {
            max: 4000,
            udp_timeout: Duration::from_secs(60),
            ..ConntrackConfig::default()
        }
    }

    #[test]
    fn settings_change_once_and_those_that_are_missing_are_reported() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = |name: &str| directory.path().join(name);
        fs::write(file("nf_conntrack_max"), "1000\n").expect("written");
        fs::write(file("hashsize"), "500\n").expect("written");
        let run = || write_to(&config(), directory.path(), &file("hashsize"));

        let lines = run().join("\n");
        assert!(
            lines.contains("nf_conntrack_max to 4000, which was 1000"),
            "{lines}"
        );
        assert!(
            lines.contains("buckets of nf_conntrack to 1000, which was 500"),
            "{lines}"
        );
        assert!(
            lines.contains("cannot set net.netfilter.nf_conntrack_udp_timeout"),
            "{lines}"
        );
        let written = fs::read_to_string(file("nf_conntrack_max")).expect("readable");
        assert_eq!(written, "4000");
        assert_eq!(run().len(), 1, "only the missing one");
    }

    #[test]
    fn nothing_is_written_if_connections_are_not_tracked_or_nothing_is_configured() {
        let directory = tempfile::tempdir().expect("a directory");
        let none = directory.path().join("none");
        let lines = write_to(&config(), &none, &none);
        assert!(
            matches!(&*lines, [line] if line.contains("not loaded")),
            "{lines:?}"
        );
        assert!(write_to(&ConntrackConfig::default(), &none, &none).is_empty());
    }
}
