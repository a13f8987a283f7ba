//! End-to-end tests of the tunnel over loopback. One process is the ingress and the gateway, other processes
//! are agents, and the targets are threads in the test process. The tests need no privileges.

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod targets;

#[cfg(test)]
mod attacks;
#[cfg(test)]
mod bytes;
#[cfg(test)]
mod clocks;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod identity;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod stalls;
