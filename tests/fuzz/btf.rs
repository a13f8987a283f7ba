//! Fuzzes the parser for BTF type information.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tunnel_userspace::fuzz::btf(bytes));
