//! The contract between Culvert's kernel programs and its daemon.
//!
//! - [`addr`]: addresses, ports and protocols; each type fixes its byte order
//! - [`service`]: keys and values of the service maps
//! - [`affinity`]: keys and values of the session affinity map
//! - [`decide`]: chooses the backend for a frontend, using any implementation of the maps
//! - [`flow`]: keys and values of the map of translated packets' flows
//! - [`fragment`]: keys and values of the map of fragments
//! - [`forward`]: decides how packets are translated, using any implementation of the maps
//! - [`kernel_offsets`]: fields of kernel structures that the programs read
//! - [`older`]: the older translations of UDP sockets
//! - [`origin`]: the last translation of each socket
//! - [`packet`]: reads the headers of packets
//! - [`reason`]: the reasons shared by counters, metrics and logs
//! - [`refusal`]: builds the packets that refuse connections and datagrams
//! - [`rewrite`]: replaces addresses and ports in packets, and updates checksums
//! - [`steering`]: keys and values of the steering maps; steering prefixes
//! - [`select`]: pure functions that select a slot, hash a client or check a stored choice
//! - [`table`]: the table of all maps and programs
//! - [`locality`]: determines whether the sender of a packet counts as local
//! - [`lookup`]: looks up the record for a key, and retries if the record belongs to another key
//!
//! None of this code needs a kernel, so unit tests run the same functions as the kernel programs.
#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

pub mod addr;
pub mod affinity;
pub mod crc32c;
pub mod decide;
pub mod flow;
pub mod forward;
pub mod fragment;
pub mod kernel_offsets;
pub mod locality;
pub mod lookup;
pub mod older;
pub mod origin;
pub mod packet;
pub mod packet_link;
pub mod reason;
pub mod refusal;
pub mod rewrite;
pub mod select;
pub mod service;
pub mod service_range;
pub mod steering;
pub mod table;

/// The version of all map layouts in this crate. It is part of the path under which maps are pinned, so
/// programs and daemons with different layouts never share a map.
pub const LAYOUT_VERSION: u32 = 10;
