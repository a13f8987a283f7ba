//! Fuzzes the parser for the kernel's replies to `sock_diag` requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| assert!(tunnel_userspace::fuzz::sock_diag(bytes)));
