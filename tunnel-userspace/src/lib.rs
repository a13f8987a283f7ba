//! Culvert's daemon and command line.
//!
//! - [`app`]: one file a role, each wires its parts in order
//! - [`cli`]: the command line
//! - [`config`]: the configuration
//! - [`source`]: where objects come from
//! - [`k8s`]: Kubernetes objects to domain types, with the field in each error
//! - [`model`]: plain domain types
//! - [`net`]: links, addresses and routes of this node
//! - [`sockets`]: ends connected sockets of backends that are gone
//! - [`plan`]: what the maps should hold (pure)
//! - [`reconcile`]: the owner of the maps: what is, what should be, and the writes between
//! - [`bpf`]: all that touches aya or the kernel's BPF
//! - [`identity`]: certificates of gateways and agents: the CA that makes them, the store that
//!   watches them, and TLS made from them
//! - [`events`]: what an operator must act on, as Kubernetes Events
//! - [`admin`]: status, metrics, health
//! - [`tunnel`]: from an ingress over a gateway to the agent of an edge node
//! - [`tasks`], [`drain`], [`latest`], `parallel`, `listen`, [`clock`], `duration`, `capabilities`, [`failure`],
//!   [`telemetry`]: tasks with an owner; the wish to stop; values that others follow; work by several threads;
//!   listening sockets; the monotonic clock; durations in words; the rights of this process; errors in words; logs
//! - [`fuzz`]: the parsers of what others wrote, for fuzz targets
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
