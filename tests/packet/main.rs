//! Tests how the tc programs treat packets, using `BPF_PROG_TEST_RUN`. The tests need root and a kernel with
//! BPF.

#[cfg(test)]
mod errors;
#[cfg(test)]
mod fragments;
#[cfg(test)]
mod frame;
#[cfg(test)]
mod guard;
#[cfg(test)]
mod segment;
#[cfg(test)]
mod service;
#[cfg(test)]
mod translation;
