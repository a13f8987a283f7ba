//! Tests of the tunnel from end to end over loopback: one process is the ingress and the gateway, others are
//! agents, and the targets are threads of the test. They need no privileges.

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod targets;

#[cfg(test)]
mod attacks;
#[cfg(test)]
mod bytes;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod identity;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod stalls;
