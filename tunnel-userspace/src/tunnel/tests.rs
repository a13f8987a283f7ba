//! Tests of the complete tunnel in one process, on loopback: client, ingress, gateway, agent, target.

mod copying;
mod fixture;
mod http2_limits;
mod refusals;
mod resets;
mod sessions;
