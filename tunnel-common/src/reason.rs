//! Why a connect, a datagram or an object ended as it did: one list for the kernel's counters,
//! the label of the metric and the word in the log.

/// A reason. The number is the index of the counter in the map `count`.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u32)]
pub enum Reason {
    /// A connect or datagram was sent on to a backend that was chosen for it.
    Translated = 0,
    /// A connect or datagram was sent on to the backend that its flow already had.
    TranslatedSticky = 1,
    /// Refused: the front has no usable backend.
    NoBackend = 2,
    /// Refused: the record of the front changed under each of the reader's tries.
    RecordUnstable = 3,
    /// Refused: a record led to a slot or backend that does not exist.
    RecordBroken = 4,
    /// UDP refused: the socket can't remember its translation (`net.core.optmem_max`).
    StorageFull = 5,
    /// TCP translated although the socket can't remember it: its peer name shows the backend.
    TranslatedUntracked = 6,
    /// A socket began to remember a translation.
    SocketTracked = 7,
    /// A socket that remembered a translation was closed.
    SocketReleased = 8,
    /// A socket's older translation moved to the map `overflow`.
    Overflowed = 9,
    /// Not programmed: no room for another front.
    FrontsFull = 10,
    /// Not programmed: no room for the slots of a set.
    SlotsFull = 11,
    /// Not programmed: no room for another backend.
    BackendsFull = 12,
    /// Not programmed: another Service has the same address, port and protocol.
    FrontClaimed = 13,
    /// Not programmed: a map could not be written.
    WriteFailed = 14,
    /// Not read: a manifest, or an object in it, is bad.
    ObjectRefused = 15,
}

impl Reason {
    /// Every reason, in the order of its number.
    pub const ALL: [Self; 16] = [
        Self::Translated,
        Self::TranslatedSticky,
        Self::NoBackend,
        Self::RecordUnstable,
        Self::RecordBroken,
        Self::StorageFull,
        Self::TranslatedUntracked,
        Self::SocketTracked,
        Self::SocketReleased,
        Self::Overflowed,
        Self::FrontsFull,
        Self::SlotsFull,
        Self::BackendsFull,
        Self::FrontClaimed,
        Self::WriteFailed,
        Self::ObjectRefused,
    ];

    /// How many reasons there can be before the layout changes: the size of the map `count`.
    pub const CAPACITY: u32 = 64;

    /// The index of the kernel's counter.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn index(self) -> u32 {
        self as u32
    }

    /// The word for metrics, logs and tables.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Translated => "translated",
            Self::TranslatedSticky => "translated_sticky",
            Self::NoBackend => "no_backend",
            Self::RecordUnstable => "record_unstable",
            Self::RecordBroken => "record_broken",
            Self::StorageFull => "storage_full",
            Self::TranslatedUntracked => "translated_untracked",
            Self::SocketTracked => "socket_tracked",
            Self::SocketReleased => "socket_released",
            Self::Overflowed => "overflowed",
            Self::FrontsFull => "fronts_full",
            Self::SlotsFull => "slots_full",
            Self::BackendsFull => "backends_full",
            Self::FrontClaimed => "front_claimed",
            Self::WriteFailed => "write_failed",
            Self::ObjectRefused => "object_refused",
        }
    }

    /// What it means, in a sentence for people.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Translated => "sent to a backend that was chosen for it",
            Self::TranslatedSticky => "sent to the backend that its UDP flow already had",
            Self::NoBackend => "refused: the Service has no usable backend",
            Self::RecordUnstable => {
                "refused: the record of the front kept changing while it was read"
            }
            Self::RecordBroken => "refused: a record led to nowhere",
            Self::StorageFull => "UDP refused: no socket storage (net.core.optmem_max)",
            Self::TranslatedUntracked => {
                "TCP translated without socket storage; peer names show the backend"
            }
            Self::SocketTracked => "a socket began to remember a translation",
            Self::SocketReleased => "a socket that remembered a translation was closed",
            Self::Overflowed => "an older translation of a socket moved to the overflow map",
            Self::FrontsFull => "not programmed: bpf.maps.fronts is used up",
            Self::SlotsFull => "not programmed: bpf.maps.slots is used up",
            Self::BackendsFull => "not programmed: bpf.maps.backends is used up",
            Self::FrontClaimed => {
                "not programmed: another Service has this address, port and protocol"
            }
            Self::WriteFailed => {
                "not programmed: the kernel refused a map write; it is tried again"
            }
            Self::ObjectRefused => "not read: a manifest, or an object in it, is bad",
        }
    }

    /// Whether the kernel programs count it; the daemon counts the others.
    #[must_use]
    pub const fn is_of_kernel(self) -> bool {
        self.index() <= Self::Overflowed.index()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn reasons_stand_at_the_index_of_their_number_and_fit_the_map() {
        for (index, reason) in (0_u32..).zip(Reason::ALL) {
            assert_eq!(reason.index(), index);
            assert!(index < Reason::CAPACITY);
        }
    }

    #[test]
    fn no_two_reasons_share_a_word() {
        let words: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();

        assert_eq!(words.len(), Reason::ALL.len());
    }
}
