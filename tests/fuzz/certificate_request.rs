//! Fuzzes the parser for certificate signing requests.
#![no_main]

libfuzzer_sys::fuzz_target!(
    |bytes: &[u8]| assert!(tunnel_userspace::fuzz::certificate_request(bytes))
);
