//! Tests of the kernel programs with real sockets, and of the daemon's life cycle. They need root, a
//! cgroup v2 hierarchy and a kernel with BPF.

#![cfg(test)]

mod programs;
mod scene;
mod support;
mod under_load;

mod affinity;
mod capabilities;
mod carried;
mod choice;
mod churn;
mod cleanup;
mod conns;
mod counters;
mod damaged;
mod datagrams;
mod ended;
mod features;
mod flows;
mod full;
mod guard;
mod health;
mod helper;
mod hooks;
mod kernel_log;
mod layouts;
mod least;
mod listeners;
mod live;
mod masquerade;
mod names;
mod natives;
mod prepare;
mod race;
mod reach;
mod refused;
mod restart;
mod rewrite;
mod sizes;
mod sources;
mod tunnel;
mod untouched;
