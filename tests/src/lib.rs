//! The laboratory: nodes made of network namespaces and cgroups, real sockets in them, and records of
//! the events of each connection, kept by servers and clients.
//!
//! A *place* (a node's host, a pod, a client outside) is a network namespace **and** a cgroup. An agent
//! process holds it: everything in the place ends with the agent, and the agent ends with the process
//! that started it, even if that is killed.

pub mod admin;
pub mod agent;
pub mod cgroup;
pub mod clock;
pub mod daemon;
pub mod edge;
pub mod ends;
pub mod environment;
pub mod feature;
pub mod flow;
pub mod http;
pub mod instance;
pub mod interrupt;
mod ip;
pub mod ipvs;
pub mod kubelet;
pub mod lab;
pub mod load;
pub mod log;
pub mod manifest;
pub mod node;
pub mod pki;
pub mod place;
pub mod pod;
pub mod scale;
pub mod serve;
pub mod shared;
pub mod site;
pub mod table;
pub mod topology;
pub mod usage;
pub mod verifier;
pub mod wait;
