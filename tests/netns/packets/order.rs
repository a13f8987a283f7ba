//! The programs on an uplink among others: the guard runs before the program that translates, whichever is attached first, and
//! no program that translates is attached to a qdisc for packets that arrive only.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
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
    guard::{UPLINK, load_data_path, uplinks},
    support::{ensure_eq, run},
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

#[test]
fn filters_translate_only_at_a_qdisc_for_both_directions_and_guard_at_either() -> Result<()> {
    let node = Node::new()?;
    let host = node.host();
    let pins = PinDirectory::lock(&node.bpffs())?;
    let features = Features {
        tcx: false,
        ..bpf::probe()?
    };
    let data_path = load_data_path(&pins, features, Some(PacketSettings::default()))?;
    let (mut guard, mut translation) = (data_path.guard()?, data_path.translation()?);
    let mut attach = || {
        host.in_network(|| {
            guard.guard_uplinks(&uplinks(), true)?;
            let attached = translation.attach(&uplinks(), &BTreeMap::new(), true);
            Ok((attached, translation.complete_links()))
        })
    };
    let filters = || -> Result<(usize, usize)> {
        let count = |direction: &str, program: &str| -> Result<usize> {
            let shown = run(host, &format!("tc filter show dev uplink {direction}"))?;
            Ok(shown.matches(&format!("{program} direct-action")).count())
        };
        Ok((count("ingress", "guard")?, count("ingress", "out")?))
    };

    for qdisc in ["ingress", "clsact", "ingress"] {
        run(host, &format!("tc qdisc add dev uplink {qdisc}"))?;
        let (attached, complete) = attach()?;
        ensure_eq("guards, and out at ingress", filters()?, (1, 0)).context(qdisc)?;
        if qdisc == "clsact" {
            attached?;
            ensure!(complete.contains(&UPLINK.0), "no program on {complete:?}");
        } else {
            let error = attached.err().map(anyhow::Error::from);
            let error = format!("{:#}", error.context("attached at ingress")?);
            let wanted = "device uplink: it has the qdisc ingress";
            ensure!(error.contains(wanted), "{error}");
            ensure!(complete.is_empty(), "programs on {complete:?}");
        }
        run(host, &format!("tc qdisc del dev uplink {qdisc}"))?;
    }
    Ok(())
}
