//! The contract between Culvert's kernel programs and its daemon.
//!
//! - [`addr`]: addresses, ports and protocols, with the byte order in the type
//! - [`service`]: keys and values of the service maps
//! - [`affinity`]: which backend a client keeps
//! - [`decide`]: from a front to a backend, over any maps
//! - [`kernel`]: where a kernel keeps what the programs read of its own structures
//! - [`origin`]: what a socket remembers of its translation
//! - [`reason`]: why a connect, datagram, stream or object ended as it did
//! - [`steering`]: keys and values of the steering maps; addresses that stand for a node and port
//! - [`select`]: pure decisions: which slot, whether a remembered choice still holds
//! - [`table`]: every map and program, a row each
//! - [`lookup`]: the record that a key leads to, looked up again where it is another's
//!
//! Nothing here needs a kernel, so the same functions run in the programs and under test.
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
