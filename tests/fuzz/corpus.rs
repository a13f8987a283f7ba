//! Runs the fuzzed parsers on every seed, so that a bug found by fuzzing is noticed if it comes back, even if
//! nobody runs the fuzzer.
#![expect(
    clippy::tests_outside_test_module,
    reason = "the file has only tests and their helper"
)]

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use tunnel_userspace::fuzz;

/// Passes each seed of a fuzz target to `parse`, once in full and once without the last byte. Returns an
/// error if `parse` returns false, or if there are fewer than two seeds.
fn check_seeds(target: &str, parse: impl Fn(&[u8]) -> bool) -> Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    let seeds =
        fs::read_dir(&directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut count = 0;
    for seed in seeds {
        let path = seed?.path();
        let bytes = fs::read(&path)?;
        let incomplete = bytes.split_last().map_or(&[][..], |(_, rest)| rest);
        ensure!(
            parse(&bytes) && parse(incomplete),
            "the check of {target} fails for {}",
            path.display()
        );
        count += 1;
    }
    ensure!(
        count > 1,
        "{} has {count} seeds, too few",
        directory.display()
    );
    Ok(())
}

#[test]
fn manifests_are_parsed_alike_with_and_without_an_earlier_version() -> Result<()> {
    check_seeds("manifests", fuzz::manifests)
}

#[test]
fn an_error_in_a_kube_proxy_config_has_a_field_and_a_reason() -> Result<()> {
    check_seeds("kube_proxy", fuzz::kube_proxy)
}

#[test]
fn a_sock_diag_reply_has_no_more_messages_than_fit_into_it() -> Result<()> {
    check_seeds("sock_diag", fuzz::sock_diag)
}

#[test]
fn a_certificate_request_is_parsed_within_bounds() -> Result<()> {
    check_seeds("certificate_request", fuzz::certificate_request)
}

#[test]
fn btf_is_parsed_without_a_panic() -> Result<()> {
    check_seeds("btf", |bytes| {
        fuzz::btf(bytes);
        true
    })
}

#[test]
fn headers_of_tunnel_streams_are_parsed_without_a_panic() -> Result<()> {
    check_seeds("tunnel_messages", |bytes| {
        fuzz::tunnel_messages(bytes);
        true
    })
}

#[test]
fn a_packet_that_is_read_has_complete_headers_and_addresses_that_are_forwarded() -> Result<()> {
    check_seeds("packet", fuzz::packet)
}
