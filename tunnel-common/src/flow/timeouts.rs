//! The timeouts of idle flows.

use super::Phase;

/// The time after which an idle flow ends in each phase, in seconds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Timeouts {
    /// For [`Phase::Closed`].
    pub closed: u32,
    /// For [`Phase::Closing`].
    pub closing: u32,
    /// For [`Phase::HalfOpen`].
    pub half_open: u32,
    /// For [`Phase::Unanswered`].
    pub unanswered: u32,
    /// For [`Phase::Answered`].
    pub answered: u32,
    /// For [`Phase::HalfClosed`].
    pub half_closed: u32,
    /// For [`Phase::Established`].
    pub established: u32,
}

impl Timeouts {
    /// The defaults: those of kube-proxy for TCP (`conntrack.tcpEstablishedTimeout`, `tcpCloseWaitTimeout`), and of the
    /// kernel's connection tracking for the rest (`nf_conntrack_proto_tcp.c`, `nf_conntrack_proto_udp.c`).
    pub const DEFAULT: Self = Self {
        closed: 10,
        closing: 120,
        half_open: 120,
        unanswered: 30,
        answered: 120,
        half_closed: 3600,
        established: 86_400,
    };

    /// Returns the timeouts as words, which the loader sets in the programs.
    #[must_use]
    pub const fn to_words(self) -> [u32; 7] {
        let Self {
            closed,
            closing,
            half_open,
            unanswered,
            answered,
            half_closed,
            established,
        } = self;
        [
            closed,
            closing,
            half_open,
            unanswered,
            answered,
            half_closed,
            established,
        ]
    }

    /// Converts the words of [`Self::to_words`] to timeouts.
    #[inline(always)]
    #[must_use]
    pub const fn from_words(words: [u32; 7]) -> Self {
        let [
            closed,
            closing,
            half_open,
            unanswered,
            answered,
            half_closed,
            established,
        ] = words;
        Self {
            closed,
            closing,
            half_open,
            unanswered,
            answered,
            half_closed,
            established,
        }
    }

    /// Returns true if a flow in this phase, which was last used at a time in seconds, has ended.
    #[inline(always)]
    #[must_use]
    pub const fn is_over(&self, phase: Phase, last_used: u32, now: u32) -> bool {
        let elapsed = now.wrapping_sub(last_used);
        // A program that reads a more precise clock may have used the flow a moment later than now.
        elapsed > self.of(phase) && elapsed <= u32::MAX / 2
    }

    /// Returns the timeout of a phase.
    #[inline(always)]
    #[must_use]
    pub const fn of(&self, phase: Phase) -> u32 {
        match phase {
            Phase::Closed => self.closed,
            Phase::Closing => self.closing,
            Phase::HalfOpen => self.half_open,
            Phase::Unanswered => self.unanswered,
            Phase::Answered => self.answered,
            Phase::HalfClosed => self.half_closed,
            Phase::Established => self.established,
        }
    }
}
