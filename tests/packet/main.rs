//! Tests of the tc programs' verdicts on packets, by `BPF_PROG_TEST_RUN`. They need root and a kernel
//! with BPF.

#[cfg(test)]
mod frame;
#[cfg(test)]
mod guard;
