//! Tests of the complete tunnel in one process, on loopback: client, ingress, gateway, agent, target.

mod ends;
mod flow;
mod harness;
mod refusals;
mod sessions;
mod traps;
