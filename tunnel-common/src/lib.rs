//! The contract between Culvert's kernel programs and its daemon.
//!
//! - [`addr`]: addresses, ports and protocols, with the byte order in the type
//! - [`service`]: keys and values of the service maps
//! - [`affinity`]: the backends that clients keep
//! - [`decide`]: the decision from a frontend to a backend, over any maps
//! - [`kernel`]: offsets in the kernel's own structures, which the programs read
//! - [`origin`]: the translations that a socket remembers
//! - [`reason`]: why a connect, datagram, stream or object ended as it did
//! - [`steering`]: keys and values of the steering maps; addresses that represent a node and port
//! - [`select`]: pure decisions: which slot, whether a stored choice still holds
//! - [`table`]: every map and program, one row each
//! - [`lookup`]: the lookup of a key's record, repeated if the record is another key's
//!
//! No code here needs a kernel, so the same functions run in the programs and under test.
#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

pub mod addr;
pub mod affinity;
pub mod decide;
pub mod kernel;
pub mod lookup;
pub mod origin;
pub mod reason;
pub mod select;
pub mod service;
pub mod steering;
pub mod table;

/// The version of every map layout in this crate. It is part of the path under which maps are
/// pinned, so programs and daemons of different layouts never share a map.
pub const LAYOUT_VERSION: u32 = 6;
