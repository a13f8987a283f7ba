//! Parses every seed once, so that bugs found by fuzzing stay fixed, also where no fuzzer runs.
#![expect(clippy::tests_outside_test_module, reason = "all of it is tests")]

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use tunnel_userspace::fuzz;

/// Passes each seed of a target to its parser, complete and without its last byte.
fn all_hold(target: &str, holds: impl Fn(&[u8]) -> bool) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let seeds = fs::read_dir(&folder).with_context(|| format!("{}", folder.display()))?;
    let mut count = 0;
    for seed in seeds {
        let path = seed?.path();
        let bytes = fs::read(&path)?;
        let short = bytes.split_last().map_or(&[][..], |(_, rest)| rest);
        ensure!(holds(&bytes) && holds(short), "{}", path.display());
        count += 1;
    }
    ensure!(count > 1, "{} has {count} seeds", folder.display());
    Ok(())
}

#[test]
fn manifests_are_understood_alike_beside_their_last_version_and_alone() -> Result<()> {
    all_hold("manifests", fuzz::manifests)
}

#[test]
fn what_is_refused_of_a_kube_proxy_config_has_a_field_and_a_reason() -> Result<()> {
    all_hold("kube_proxy", fuzz::kube_proxy)
}

#[test]
fn an_answer_about_sockets_has_no_more_messages_than_room() -> Result<()> {
    all_hold("sock_diag", fuzz::sock_diag)
}

#[test]
fn descriptions_of_types_are_read_or_not() -> Result<()> {
    all_hold("btf", |bytes| {
        fuzz::btf(bytes);
        true
    })
}

#[test]
fn heads_of_streams_are_read_or_not() -> Result<()> {
    all_hold("heads", |bytes| {
        fuzz::heads(bytes);
        true
    })
}
