//! The test laboratory: nodes made of network namespaces and cgroups, with real sockets in them, and
//! servers and clients that record the events of each connection.
//!
//! A *sandbox* (of a node's host, a pod, or a client outside) is a network namespace **and** a cgroup. An
//! executor process keeps it alive. When the process that started the executor ends, even by a kill, the
//! executor ends, and with it everything in the sandbox.

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
