//! Entry points for the fuzz targets (`tests/fuzz`): parsers for untrusted bytes, which must not panic on any
//! input.

use crate::{
    bpf::search_btf, config::Config, net::messages_in, source::file::cache_changes_nothing,
    tunnel::parse_messages,
};

/// Parses two versions of a manifest file, separated by a NUL byte. Returns false if parsing the second
/// version incrementally, after the first, gives a different result from parsing it alone.
#[must_use]
pub fn manifests(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let (first, second) = text.split_once('\0').unwrap_or(("", &text));
    cache_changes_nothing(first, second)
}

/// Parses a kube-proxy config file. Returns false if this fails with an error that lacks the field or the
/// reason.
#[must_use]
pub fn kube_proxy(bytes: &[u8]) -> bool {
    let read = Config::parse_kube_proxy(&String::from_utf8_lossy(bytes));
    read.is_ok() || read.is_err_and(|(field, reason)| !field.is_empty() && !reason.is_empty())
}

/// Parses a chunk of the kernel's reply to a `sock_diag` request. Returns false if the parser finds more
/// messages than the chunk has room for.
#[must_use]
pub fn sock_diag(bytes: &[u8]) -> bool {
    /// The size of a netlink message header, in bytes.
    const HEADER: usize = 16;
    messages_in(bytes) <= bytes.len().div_ceil(HEADER)
}

/// Searches BTF type information for the field offsets that the kernel programs need.
pub fn btf(bytes: &[u8]) {
    search_btf(bytes);
}

/// Parses the HTTP/2 headers on tunnel streams: the hello between gateway and agent, CONNECT requests, and
/// the responses that refuse them.
pub fn tunnel_messages(bytes: &[u8]) {
    parse_messages(bytes);
}
