//! Fuzzes the parser for the headers of packets.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| assert!(tunnel_userspace::fuzz::packet(bytes)));
