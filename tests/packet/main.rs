//! The verdicts of tc programs on packets, by `BPF_PROG_TEST_RUN`. Needs root and a kernel with BPF.

#[cfg(test)]
mod frame;
#[cfg(test)]
mod guard;
