//! Fuzzes the parser for kube-proxy's configuration.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| assert!(tunnel_userspace::fuzz::kube_proxy(bytes)));
