/// The stage of the work on the maps, which says what the next pass may write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    /// Before every source has told its first list: nothing is written.
    Waiting,
    /// Before the first pass. It writes everything, with few calls.
    Starting,
    /// Some writes of the first pass were refused, and which is not known: nothing is written before
    /// the maps are read again.
    Doubtful,
    /// After that, as [`Self::Starting`], with a call for each write: one that is refused again stops no
    /// other.
    Resuming,
    /// The ids in the maps have their names, and passes write the changes.
    Following,
}

impl Mode {
    /// The sources were heard.
    pub(super) fn heard(self, synced: bool) -> Self {
        let begins = synced && self == Self::Waiting;
        if begins { Self::Starting } else { self }
    }

    /// A pass was made, and its writes were all made or each refused by itself.
    pub(super) const fn passed(self) -> Self {
        if self.writes() { Self::Following } else { self }
    }

    /// The maps were read again.
    pub(super) fn read_again(self) -> Self {
        let waits = self == Self::Waiting;
        if waits { self } else { Self::Resuming }
    }

    /// Whether a pass may write.
    pub(super) const fn writes(self) -> bool {
        !matches!(self, Self::Waiting | Self::Doubtful)
    }
}
