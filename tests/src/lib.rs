//! The test lab. Its nodes consist of network namespaces and cgroups that contain real sockets, and its
//! servers and clients record the events on each connection.
//!
//! A *sandbox* (for a node's host, a pod or an external client) is a network namespace **and** a cgroup. An
//! executor process keeps it alive. The executor exits when the process that started it exits or is killed,
//! and everything in the sandbox is then removed.

pub mod address;
pub mod admin;
pub mod certificate_request;
pub mod cgroup;
pub mod checksum;
pub mod clock;
pub mod culvert_instance;
pub mod daemon;
pub mod edge_node;
pub mod empty_program;
pub mod environment;
pub mod executor;
pub mod fake_kubelet;
pub mod feature;
mod generic_netlink;
pub mod hostile_peer;
pub mod http;
pub mod interrupt;
mod ip;
pub mod ipvs;
pub mod kube_proxy_rules;
pub mod lab;
pub mod load;
pub mod load_scale;
pub mod log;
pub mod manifest;
pub mod network_drops;
pub mod nfs;
pub mod node;
pub mod node_network;
pub mod pki;
pub mod pod;
pub mod process_usage;
pub mod reachability;
pub mod sandbox;
pub mod server;
pub mod shared_fixture;
pub mod table;
pub mod throughput;
pub mod tunnel_process;
pub mod tunnel_testbed;
pub mod verifier;
pub mod wait;
pub mod wireguard;
