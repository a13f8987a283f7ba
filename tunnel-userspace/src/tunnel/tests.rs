//! End-to-end tests of the tunnel in one process, over loopback: client, ingress, gateway, agent and target.

mod access;
mod copying;
mod fixture;
mod http2_limits;
mod refusals;
mod resets;
mod sessions;
