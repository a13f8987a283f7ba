//! Programs at tc on packets, by `BPF_PROG_TEST_RUN`: what they say to each.
//! Needs the rights of root and a kernel with BPF.

#[cfg(test)]
mod frame;
#[cfg(test)]
mod guard;
