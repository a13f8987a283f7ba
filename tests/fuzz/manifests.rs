//! Fuzzes the parser for Kubernetes manifests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| assert!(tunnel_userspace::fuzz::manifests(bytes)));
