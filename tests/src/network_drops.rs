//! The packets that the kernel has dropped in a network namespace, by its own counters. Tests show them with a failure.

use std::fs;

/// Words in the names of counters of lost packets.
const LOSSES: [&str; 6] = ["Errors", "Discard", "Drop", "NoRoutes", "NoPorts", "Fails"];

/// Returns the counters of lost packets that are not 0 in the network namespace of a process, such as `UdpRcvbufErrors 3`. A kernel
/// may lack some of them.
pub fn of_process(pid: u32) -> Vec<String> {
    let read =
        |name: &str| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let mut drops = of_pairs(&read("snmp"));
    drops.extend(of_lines(&read("snmp6")));
    for (name, column) in [
        ("stat/arp_cache", "unresolved_discards"),
        ("stat/ndisc_cache", "unresolved_discards"),
    ] {
        drops.extend(of_table(&read(name), column).map(|count| format!("{name} {count}")));
    }
    // The second column is the number of packets for which the queue of the CPU had no room.
    let softnet = read("softnet_stat");
    let dropped = softnet
        .lines()
        .filter_map(|line| hexadecimal(line.split(' ').nth(1)?));
    let dropped: u64 = dropped.sum();
    drops.extend((dropped > 0).then(|| format!("softnet {dropped}")));
    drops
}

fn is_loss(name: &str) -> bool {
    LOSSES.iter().any(|word| name.contains(word))
}

/// Reads pairs of lines: names, and numbers.
fn of_pairs(text: &str) -> Vec<String> {
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let mut drops = Vec::new();
    for [names, numbers] in lines.as_chunks().0 {
        let protocol = names.first().map_or("", |name| name.trim_end_matches(':'));
        let counters = names.iter().zip(numbers).skip(1);
        let lost = counters.filter(|(name, number)| is_loss(name) && **number != "0");
        drops.extend(lost.map(|(name, number)| format!("{protocol}{name} {number}")));
    }
    drops
}

/// Reads lines of a name and a number.
fn of_lines(text: &str) -> Vec<String> {
    let pairs = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?, words.next()?))
    });
    let lost = pairs.filter(|(name, number)| is_loss(name) && *number != "0");
    lost.map(|(name, number)| format!("{name} {number}"))
        .collect()
}

/// Returns the sum of a column in a table of hexadecimal numbers, or `None` if it is 0.
fn of_table(text: &str, column: &str) -> Option<u64> {
    let mut lines = text.lines();
    let at = lines
        .next()?
        .split_whitespace()
        .position(|name| name == column)?;
    let numbers = lines.filter_map(|line| hexadecimal(line.split_whitespace().nth(at)?));
    Some(numbers.sum()).filter(|sum| *sum > 0)
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_packets_are_found_in_each_format() {
        let snmp = "Udp: InDatagrams NoPorts RcvbufErrors\nUdp: 7 0 3\n";
        assert_eq!(of_pairs(snmp), ["UdpRcvbufErrors 3"]);
        assert_eq!(
            of_lines("Ip6InReceives 7\nIp6OutDiscards 2\n"),
            ["Ip6OutDiscards 2"]
        );
        let table = "entries unresolved_discards\n00000007 0000000a\n00000007 00000001\n";
        assert_eq!(of_table(table, "unresolved_discards"), Some(11));
    }
}
