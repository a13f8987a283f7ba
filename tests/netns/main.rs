//! Tests the kernel programs with real sockets, and the daemon's life cycle. The tests need root, a cgroup v2
//! hierarchy and a kernel with BPF.

#![cfg(test)]

mod background_load;
mod fixture;
mod migration;
mod programs;
mod support;

mod affinity;
mod algorithms;
mod attack;
mod capabilities;
mod cleanup;
mod counters;
mod endpoint_churn;
mod failed_starts;
mod features;
mod full_maps;
mod guard;
mod health_checks;
mod hooks;
mod kernel_log;
mod kernel_modules;
mod least_conn;
mod local_listeners;
mod manifest_changes;
mod map_layouts;
mod map_sizes;
mod masquerade;
mod name_resolution;
mod open_connections;
mod packets;
mod prepare;
mod race;
mod refusals_by_retval;
mod refusals_by_rewrite;
mod restart;
mod service_addresses;
mod socket_helper;
mod socket_termination;
mod source_ranges;
mod tunnel;
mod udp_flows;
mod unconnected_udp;
mod untranslated;
