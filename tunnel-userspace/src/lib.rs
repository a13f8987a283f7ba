//! Culvert's daemon and command line.
//!
//! - [`app`]: one file per role, each wires its parts in order
//! - [`cli`]: the command line
//! - [`config`]: the configuration
//! - [`source`]: the sources of objects: files and the API server
//! - [`k8s`]: Kubernetes objects to domain types, with the field in each error
//! - [`model`]: plain domain types
//! - [`net`]: links, addresses and routes of this node
//! - [`sockets`]: ends connected sockets of removed backends
//! - [`plan`]: the desired content of the maps (pure)
//! - [`reconcile`]: the owner of the maps: their actual content, its difference from the desired one,
//!   the writes
//! - [`bpf`]: all code that uses aya or the kernel's BPF
//! - [`identity`]: certificates of gateways and agents: the CA that issues them, the store that watches
//!   them, and TLS with them
//! - [`events`]: Kubernetes Events for problems that an operator must act on
//! - [`admin`]: status, metrics, health
//! - [`tunnel`]: connections from an ingress through a gateway to the agent of an edge node
//! - [`tasks`], [`drain`], [`latest`], `parallel`, `listen`, [`clock`], `duration`, `capabilities`,
//!   [`failure`], [`telemetry`]: tasks with an owner; the shutdown signal; values published on change;
//!   work in several threads; listening sockets; the monotonic clock; durations as text; capabilities of
//!   this process; error chains; logs
//! - [`fuzz`]: the parsers of untrusted bytes, for fuzz targets
pub mod admin;
pub mod app;
pub mod bpf;
mod capabilities;
pub mod cli;
pub mod clock;
pub mod config;
pub mod drain;
mod duration;
pub mod events;
pub mod failure;
pub mod fuzz;
pub mod identity;
pub mod k8s;
pub mod latest;
mod listen;
pub mod model;
pub mod net;
mod parallel;
pub mod plan;
pub mod reconcile;
pub mod sockets;
pub mod source;
pub mod tasks;
pub mod telemetry;
pub mod tunnel;
