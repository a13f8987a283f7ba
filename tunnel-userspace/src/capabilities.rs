//! Checks which capabilities(7) this process has.

use std::{fs, io};

/// A capability's name, and the numbers (from `linux/capability.h`) of the capabilities that grant it.
pub(crate) type Capability = (&'static str, &'static [u32]);

pub(crate) const BPF: Capability = ("CAP_BPF", &[39, 21]);
pub(crate) const NET_ADMIN: Capability = ("CAP_NET_ADMIN", &[12]);
pub(crate) const PERFMON: Capability = ("CAP_PERFMON", &[38, 21]);
pub(crate) const SYS_ADMIN: Capability = ("CAP_SYS_ADMIN", &[21]);
pub(crate) const SYS_PTRACE: Capability = ("CAP_SYS_PTRACE", &[19]);

/// Returns the names of the wanted capabilities that the calling thread lacks.
pub(crate) fn missing(wanted: &[Capability]) -> io::Result<Vec<&'static str>> {
    missing_in(&fs::read_to_string("/proc/thread-self/status")?, wanted)
}

fn missing_in(status: &str, wanted: &[Capability]) -> io::Result<Vec<&'static str>> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = u64::from_str_radix(effective.unwrap_or_default().trim(), 16);
    let effective = effective.map_err(io::Error::other)?;
    let lacks = |numbers: &[u32]| numbers.iter().all(|bit| effective & 1_u64 << bit == 0);
    let missing = wanted.iter().filter(|(_, numbers)| lacks(numbers));
    Ok(missing.map(|(name, _)| *name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_listed() {
        let programs = [BPF, NET_ADMIN, PERFMON];
        let pods = [SYS_ADMIN, SYS_PTRACE];
        for (word, wanted, missing) in [
            ("000000c000001000", &programs[..], ""),
            (
                "0000000000000000",
                &programs[..],
                "CAP_BPF CAP_NET_ADMIN CAP_PERFMON",
            ),
            ("0000008000001000", &programs[..], "CAP_PERFMON"),
            ("0000004000001000", &programs[..], "CAP_BPF"),
            // CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
            ("0000000000200000", &programs[..], "CAP_NET_ADMIN"),
            ("0000000000280000", &pods[..], ""),
            ("0000000000200000", &pods[..], "CAP_SYS_PTRACE"),
            (
                "000000c000001000",
                &pods[..],
                "CAP_SYS_ADMIN CAP_SYS_PTRACE",
            ),
        ] {
            let status = format!("Name:\tculvert\nCapEff:\t{word}\nCapBnd:\t0\n");
            let found = missing_in(&status, wanted).expect("a number");
            assert_eq!(found.join(" "), missing, "{word}");
        }
    }

    #[test]
    fn a_status_without_capabilities_is_an_error() {
        missing_in("Name:\tculvert\n", &[BPF]).expect_err("no CapEff line");
    }
}
