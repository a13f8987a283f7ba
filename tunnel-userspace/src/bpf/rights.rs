//! The capabilities that the kernel programs take. Without one of them the kernel refuses in words
//! that don't name it, or not at once.

use std::fs;

/// Each with its number, as `linux/capability.h` has them.
const NEEDED: [(&str, u32); 3] = [("CAP_BPF", 39), ("CAP_NET_ADMIN", 12), ("CAP_PERFMON", 38)];
/// What stands for two of them.
const SYS_ADMIN: u32 = 21;

/// Those that this process doesn't have. None where that can't be found out: the kernel is asked
/// later anyway.
pub(super) fn missing() -> Vec<&'static str> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    missing_in(&status)
}

fn missing_in(status: &str) -> Vec<&'static str> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|word| u64::from_str_radix(word.trim(), 16).ok());
    let Some(effective) = effective else {
        return Vec::new();
    };
    let has = |number: u32| effective & (1 << number) != 0;
    let lacks = |(name, number): &(&str, u32)| {
        let is_implied = *name != "CAP_NET_ADMIN" && has(SYS_ADMIN);
        !has(*number) && !is_implied
    };
    NEEDED
        .iter()
        .filter(|capability| lacks(capability))
        .map(|(name, _)| *name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let of = |word: &str| missing_in(&format!("Name:\tculvert\nCapEff:\t{word}\nCapBnd:\t0\n"));

        assert_eq!(of("000000c000001000"), [""; 0]);
        assert_eq!(
            of("0000000000000000"),
            ["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"]
        );
        assert_eq!(of("0000008000001000"), ["CAP_PERFMON"]);
        assert_eq!(of("0000004000001000"), ["CAP_BPF"]);
        assert_eq!(of("0000000000200000"), ["CAP_NET_ADMIN"]);
    }

    #[test]
    fn what_is_not_known_is_not_missing() {
        assert_eq!(missing_in("Name:\tculvert\n"), [""; 0]);
    }
}
