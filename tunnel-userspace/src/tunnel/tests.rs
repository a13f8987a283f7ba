//! Tests of the complete tunnel in one process, on loopback: client, ingress, gateway, agent, target.

mod resets;
mod copying;
mod harness;
mod refusals;
mod sessions;
mod http2_limits;
