//! Tests the feature probes: a program that needs a feature loads and attaches if, and only if, the probe
//! reports the feature.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use tunnel_common::table::PROGRAMS;
use tunnel_tests::{
    node::Node,
    verifier::{self, ProgramStats},
};
use tunnel_userspace::{
    bpf::{self, Features, LoadError, PinDirectory},
    net::UplinkGuard as _,
};

use crate::{
    guard::{UPLINK, filters, load, uplinks},
    support::ensure_eq,
};

/// The verifier's limits on processed instructions and on stack size in bytes.
const INSTRUCTIONS: u64 = 1_000_000;
const STACK: u64 = 512;

#[test]
fn a_program_that_sets_an_error_loads_exactly_if_the_probe_finds_the_feature() -> Result<()> {
    let features = bpf::probe()?;
    let setting = Features {
        set_retval: true,
        ..features
    };
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;

    let loaded = load(&pins, setting);

    match loaded {
        Ok(_) => ensure!(
            features.set_retval,
            "the program loads, but the probe reports no set_retval"
        ),
        Err(error) => {
            ensure!(
                !features.set_retval,
                "the probe reports set_retval, but: {error:#}"
            );
            let is_verdict = matches!(error.downcast_ref(), Some(LoadError::Program { .. }));
            ensure!(is_verdict, "{error:#}");
        }
    }
    Ok(())
}

#[test]
fn a_tcx_link_can_be_created_exactly_if_the_probe_finds_the_feature() -> Result<()> {
    let features = bpf::probe()?;
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;

    let by_link = Features {
        tcx: true,
        ..features
    };
    let (mut guard, _counters) = load(&pins, by_link)?;
    let put = node
        .host()
        .in_network(|| Ok(guard.guard_uplinks(&uplinks(), false)?));
    ensure!(put.is_ok() == features.tcx, "{put:?}, {features:?}");
    ensure!(filters(&node)? == 0, "there is a filter next to the link");
    drop(guard);

    let (mut guard, _counters) = load(&pins, features)?;
    node.host()
        .in_network(|| Ok(guard.guard_uplinks(&uplinks(), false)?))?;
    ensure_eq("guarded", guard.guarded_links(), BTreeSet::from([UPLINK.0]))?;
    ensure_eq("filters", filters(&node)?, usize::from(!features.tcx))?;
    node.host().in_network(|| Ok(pins.remove()?)).map(drop)
}

#[test]
#[ignore = "independent of the kernel: the matrix also runs `culvert-lab verify`, which loads the same programs"]
fn every_program_is_verified_in_each_variant_that_this_kernel_supports() -> Result<()> {
    let features = bpf::probe()?;
    let measured = verifier::measure(features)?;

    let of = |program: &str, variant: &str| -> Result<ProgramStats> {
        let mut found = measured.iter().cloned();
        let found = found.find(|it| it.program == program && it.variant == variant);
        found.with_context(|| format!("the variant {variant} has no measurement of {program}"))
    };
    for program in PROGRAMS.iter().map(|program| program.name) {
        for variant in ["rewrite", "rewrite-steering", "rewrite-logged"] {
            of(program, variant)?;
        }
        ensure!(of(program, "retval").is_ok() == features.set_retval);
    }
    for it in &measured {
        let is_within = (1..INSTRUCTIONS).contains(&it.instructions) && it.stack <= STACK;
        ensure!(is_within, "{it:?}");
    }
    // The programs' constants are in read-only memory, so the verifier skips branches that the constants make
    // unreachable.
    for program in ["connect4", "connect6"] {
        let [without, with] = ["rewrite", "rewrite-steering"].map(|variant| of(program, variant));
        let [without, with] = [without?.instructions, with?.instructions];
        ensure!(without < with, "{program}: {without} and {with}");
    }
    Ok(())
}
