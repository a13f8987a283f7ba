//! Tests of the tc programs' verdicts on packets, run with `BPF_PROG_TEST_RUN`. They require root and a
//! kernel with BPF.

#[cfg(test)]
mod frame;
#[cfg(test)]
mod guard;
