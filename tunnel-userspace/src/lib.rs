//! Culvert's daemon and command line.
//!
//! - [`app`]: the roles (`culvert node`, `culvert agent` and others), one file each
//! - [`cli`]: the command line
//! - [`config`]: the configuration file
//! - [`source`]: reads objects from files and from the API server
//! - [`k8s`]: converts Kubernetes objects to domain types; each error names the field
//! - [`model`]: plain domain types
//! - [`net`]: links, addresses and routes of this node
//! - [`sockets`]: ends connected sockets of removed backends
//! - [`plan`]: computes the desired content of the maps (pure)
//! - [`reconcile`]: compares the desired content with the actual one, and writes the difference
//! - [`bpf`]: all code that uses aya or the kernel's BPF
//! - [`identity`]: certificates of gateways and agents: the CA, the store that watches the files, TLS
//! - [`events`]: Kubernetes Events for problems that need an operator
//! - [`admin`]: the HTTP endpoints for status, metrics and health
//! - [`tunnel`]: connections from an ingress through a gateway to the agent of an edge node
//! - [`tasks`], [`drain`], [`publish`], `parallel`, `listen`, [`clock`], `duration`, `capabilities`,
//!   [`error_chain`], [`telemetry`]: named tasks; the shutdown signal; publishing a value on change; work in
//!   several threads; listening sockets; the monotonic clock; durations as text; capabilities(7); error
//!   chains as text; logs
//! - [`fuzz`]: entry points of the fuzz targets
pub mod admin;
pub mod app;
pub mod bpf;
mod capabilities;
pub mod cli;
pub mod clock;
pub mod config;
pub mod drain;
mod duration;
pub mod error_chain;
pub mod events;
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
pub mod sockets;
pub mod source;
pub mod tasks;
pub mod telemetry;
pub mod tunnel;
