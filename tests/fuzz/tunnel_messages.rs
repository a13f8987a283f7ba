//! Fuzzes the parser for the HTTP/2 headers of tunnel streams.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tunnel_userspace::fuzz::tunnel_messages(bytes));
