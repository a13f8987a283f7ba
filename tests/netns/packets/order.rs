//! The order of the programs on an uplink: the guard runs before the program that translates, whichever is attached first.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use tunnel_common::reason::Reason;
use tunnel_tests::{
    feature::{self, Feature},
    node::Node,
    test_name,
};
use tunnel_userspace::{
    bpf::{self, Counters, Features, PacketSettings, PinDirectory},
    net::{PacketPrograms as _, UplinkGuard as _},
};

use crate::{
    guard::{load_data_path, uplinks},
    support::ensure_eq,
};

fn count(counters: &Counters, reason: Reason) -> Result<u64> {
    let counts = counters.read()?;
    let count = counts.iter().find(|(it, _)| *it == reason);
    Ok(count.map_or(0, |(_, count)| *count))
}

/// Sends a datagram of two fragments to the prefix of the guard. The guard drops both, so that the other program counts none.
fn expect_guard_first(is_guard_first: bool, tcx: bool) -> Result<()> {
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;
    let features = Features {
        tcx,
        ..bpf::probe()?
    };
    let data_path = load_data_path(&pins, features, Some(PacketSettings::default()))?;
    let (_maps, counters) = data_path.open_maps()?;
    let (mut guard, mut translation) = (data_path.guard()?, data_path.translation()?);
    node.host().in_network(|| {
        if is_guard_first {
            guard.guard_uplinks(&uplinks(), false)?;
        }
        translation.attach(&uplinks(), &BTreeMap::new(), false)?;
        if !is_guard_first {
            guard.guard_uplinks(&uplinks(), false)?;
        }
        Ok(())
    })?;

    let client = node.outside().udp("0.0.0.0:0")?;
    client.send_to(&[0; 2000], "198.19.0.1:53")?;
    ensure_eq("dropped", count(&counters, Reason::GuardDropped)?, 2)?;
    ensure_eq("fragments", count(&counters, Reason::FragmentUnmatched)?, 0)
}

#[test]
fn the_guard_runs_first_whichever_program_is_attached_first() -> Result<()> {
    for is_guard_first in [true, false] {
        expect_guard_first(is_guard_first, false)
            .with_context(|| format!("filters, guard first: {is_guard_first}"))?;
    }
    if feature::lacks(test_name!(), &[Feature::Tcx])? {
        return Ok(());
    }
    for is_guard_first in [true, false] {
        expect_guard_first(is_guard_first, true)
            .with_context(|| format!("links, guard first: {is_guard_first}"))?;
    }
    Ok(())
}
