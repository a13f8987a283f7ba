//! The contract between Culvert's kernel programs and its daemon.
//!
//! - [`addr`]: addresses, ports and protocols; each type fixes its byte order
//! - [`service`]: keys and values of the service maps
//! - [`affinity`]: keys and values of session affinity
//! - [`decide`]: chooses the backend for a frontend, over any implementation of the maps
//! - [`kernel_offsets`]: fields of kernel structures that the programs read
//! - [`origin`]: the translations that are stored for a socket
//! - [`reason`]: the reasons that counters, metrics and logs share
//! - [`steering`]: keys and values of the steering maps; steering prefixes
//! - [`select`]: pure functions: selects a slot, hashes a client, checks a stored choice
//! - [`table`]: the table of all maps and programs
//! - [`lookup`]: looks up the record of a key, and retries if it belongs to another key
//!
//! No code here needs a kernel, so the kernel programs and the unit tests run the same functions.
#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

pub mod addr;
pub mod affinity;
pub mod decide;
pub mod kernel_offsets;
pub mod lookup;
pub mod origin;
pub mod reason;
pub mod select;
pub mod service;
pub mod steering;
pub mod table;

/// The version of every map layout in this crate. It is part of the path under which maps are
/// pinned, so programs and daemons of different layouts never share a map.
pub const LAYOUT_VERSION: u32 = 7;
