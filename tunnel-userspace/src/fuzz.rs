//! Entry points for the fuzz targets (`tests/fuzz`): parsers for untrusted bytes, which must not panic on any
//! input.

use tunnel_common::{
    addr::Protocol,
    packet::{self, Family, Unread, is_forwarded},
};

use crate::{
    bpf::search_btf, config::Config, identity::request, net::messages_in,
    source::file::cache_changes_nothing, tunnel::parse_messages,
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

/// Parses the contents (DER) of a certificate signing request, as the controller does. Returns false if the result is larger
/// than the request, or if an error says nothing.
#[must_use]
pub fn certificate_request(bytes: &[u8]) -> bool {
    request::parses_within_bounds(bytes)
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

/// Reads the headers of a packet, which follows one byte: if it is even, the packet is IPv4. Returns false if the
/// result has addresses of the other version or addresses that are never forwarded, or if it depends on bytes behind
/// the transport header.
#[must_use]
pub fn packet(bytes: &[u8]) -> bool {
    let Some((selector, bytes)) = bytes.split_first() else {
        return true;
    };
    let is_v4 = selector % 2 == 0;
    let family = if is_v4 { Family::V4 } else { Family::V6 };
    let Ok(read) = packet::read(&bytes, family) else {
        return true;
    };
    let header = if read.protocol == Protocol::TCP {
        20
    } else {
        8
    };
    let end = usize::try_from(read.transport_offset).map_or(usize::MAX, |offset| offset + header);
    let headers_alone = bytes.get(..end).map(|it| packet::read(&it, family));
    let is_complete = headers_alone == Some(Ok(read));
    let cut = bytes.get(..end - 1).map(|it| packet::read(&it, family));
    let is_refused_if_cut = cut == Some(Err(Unread::Malformed));
    let has_valid_addresses = [read.source, read.destination]
        .iter()
        .all(|address| address.is_v4() == is_v4 && is_forwarded(*address));
    is_complete && is_refused_if_cut && has_valid_addresses
}
