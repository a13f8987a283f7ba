//! The tunnel from end to end over loopback: ingress and gateway in one process, agents in others, and
//! targets in this one. Needs no privileges.

#[cfg(test)]
mod support;
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
