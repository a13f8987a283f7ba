//! Culvert's daemon and command line.
//!
//! - [`app`]: the roles (`culvert node`, `culvert agent` and others), one file each
//! - [`cli`]: the command line
//! - [`config`]: the configuration file
//! - [`source`]: reads objects from files and from the API server
//! - [`k8s`]: converts Kubernetes objects to domain types; each error names the invalid field
//! - [`model`]: plain domain types
//! - [`net`]: this node's links, addresses and routes
//! - [`sockets`]: ends sockets that are still connected to removed backends
//! - [`plan`]: computes the desired contents of the maps (pure)
//! - [`reconcile`]: compares the desired contents of the maps with the actual ones, and writes the
//!   differences
//! - [`bpf`]: all code that uses aya or calls bpf(2)
//! - [`flows`]: counts, lists and removes the flows of translated packets
//! - [`identity`]: certificates for gateways and agents: the CA, the store that watches their files, and TLS
//! - [`explain`]: explains what becomes of a packet or connection
//! - [`events`]: Kubernetes Events for problems that need an operator's attention
//! - [`admin`]: the HTTP endpoints for status, metrics and health
//! - [`tunnel`]: connections from an ingress through a gateway to an edge node's agent
//! - [`tasks`]: named background tasks
//! - [`drain`]: the shutdown signal
//! - [`publish`]: publishes a value when it changes
//! - `parallel`: a parallel map over a slice
//! - `round_robin`: takes a limited number of items from several groups in turn
//! - `listen`: listening sockets
//! - [`file_descriptors`]: the limit on open files
//! - `allocator`: the memory allocator
//! - [`clock`]: the clocks
//! - `duration`: durations as text
//! - `serde_message`: serde's error messages in the words of JSON
//! - `capabilities`: checks which capabilities(7) the process has
//! - [`error_chain`]: an error and its sources as text
//! - [`telemetry`]: writes the log
//! - [`fuzz`]: entry points for the fuzz targets
pub mod admin;
mod allocator;
pub mod app;
pub mod bpf;
mod capabilities;
pub mod cli;
pub mod clock;
pub mod config;
pub mod controller;
pub mod drain;
mod duration;
pub mod error_chain;
pub mod events;
pub mod explain;
pub mod file_descriptors;
pub mod flows;
pub mod fuzz;
pub mod identity;
pub mod k8s;
mod listen;
pub mod model;
pub mod net;
mod parallel;
pub mod plan;
pub mod publish;
pub mod reconcile;
mod round_robin;
mod serde_message;
pub mod sockets;
pub mod source;
pub mod tasks;
pub mod telemetry;
pub mod tunnel;
