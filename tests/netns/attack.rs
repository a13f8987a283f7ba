//! Tests in which an unprivileged user, a hostile pod, a tenant or an accident attacks the data path or the
//! ingress. Each test asserts that the victim's connections and replies are the same as without the attack, and
//! that the attacker, or whatever is damaged or full, is named.

mod client_rules;
mod connected_peer;
mod damage;
mod descriptors;
mod file_locks;
mod full_disk;
mod health_port;
mod host_namespace;
mod identity;
mod ingress_shares;
mod listeners;
mod node_addresses;
mod pod_links;
mod resolver;
mod stray_programs;
mod tenants;
