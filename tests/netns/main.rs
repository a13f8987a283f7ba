//! Real sockets through the real kernel programs, and the daemon's life around them.
//! Needs the rights of root, a cgroup v2 hierarchy and a kernel with BPF.

#[cfg(test)]
mod scene;
#[cfg(test)]
mod support;

#[cfg(test)]
mod affinity;
#[cfg(test)]
mod capabilities;
#[cfg(test)]
mod carried;
#[cfg(test)]
mod choice;
#[cfg(test)]
mod churn;
#[cfg(test)]
mod cleanup;
#[cfg(test)]
mod conns;
#[cfg(test)]
mod counters;
#[cfg(test)]
mod damaged;
#[cfg(test)]
mod datagrams;
#[cfg(test)]
mod ended;
#[cfg(test)]
mod features;
#[cfg(test)]
mod flows;
#[cfg(test)]
mod full;
#[cfg(test)]
mod guard;
#[cfg(test)]
mod health;
#[cfg(test)]
mod helper;
#[cfg(test)]
mod hooks;
#[cfg(test)]
mod kernel_log;
#[cfg(test)]
mod layouts;
#[cfg(test)]
mod least;
#[cfg(test)]
mod listeners;
#[cfg(test)]
mod live;
#[cfg(test)]
mod masquerade;
#[cfg(test)]
mod names;
#[cfg(test)]
mod natives;
#[cfg(test)]
mod prepare;
#[cfg(test)]
mod race;
#[cfg(test)]
mod reach;
#[cfg(test)]
mod refused;
#[cfg(test)]
mod restart;
#[cfg(test)]
mod rewrite;
#[cfg(test)]
mod sizes;
#[cfg(test)]
mod sources;
#[cfg(test)]
mod tunnel;
#[cfg(test)]
mod untouched;
