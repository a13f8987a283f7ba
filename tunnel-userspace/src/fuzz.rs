//! The parsers of untrusted bytes, for fuzz targets (`tests/fuzz`): none may panic on any input.

use crate::{
    bpf::places_in, config::Config, net::messages_in, source::file::reads_alike, tunnel::read_heads,
};

/// Reads two versions of a file of manifests, separated by a zero byte. Returns false if the incremental
/// read of the second, after the first, differs from a fresh read of the second.
#[must_use]
pub fn manifests(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let (first, second) = text.split_once('\0').unwrap_or(("", &text));
    reads_alike(first, second)
}

/// Reads a config of kube-proxy. Returns false if an error has no field.
#[must_use]
pub fn kube_proxy(bytes: &[u8]) -> bool {
    let read = Config::parse_kube_proxy(&String::from_utf8_lossy(bytes));
    read.is_ok() || read.is_err_and(|(field, reason)| !field.is_empty() && !reason.is_empty())
}

/// Reads a part of the kernel's answer to a sock_diag request. Returns false if it counts more messages
/// than fit into the bytes.
#[must_use]
pub fn sock_diag(bytes: &[u8]) -> bool {
    /// The size of a message's header.
    const HEADER: usize = 16;
    messages_in(bytes) <= bytes.len().div_ceil(HEADER)
}

/// Finds the offsets that the programs need in a description of the kernel's types (BTF).
pub fn btf(bytes: &[u8]) {
    places_in(bytes);
}

/// Reads the heads of a tunnel's streams: the hello of either end, a CONNECT, and an answer that refuses one.
pub fn heads(bytes: &[u8]) {
    read_heads(bytes);
}
