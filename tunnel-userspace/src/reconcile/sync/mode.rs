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
    pub(super) const fn heard(self, synced: bool) -> Self {
        match self {
            Self::Waiting if synced => Self::Starting,
            Self::Waiting | Self::Starting | Self::Doubtful | Self::Resuming | Self::Following => {
                self
            }
        }
    }

    /// A pass was made, and its writes were all made or each refused by itself.
    pub(super) const fn passed(self) -> Self {
        match self {
            Self::Starting | Self::Resuming | Self::Following => Self::Following,
            Self::Waiting | Self::Doubtful => self,
        }
    }

    /// The maps were read again.
    pub(super) const fn read_again(self) -> Self {
        match self {
            Self::Waiting => Self::Waiting,
            Self::Starting | Self::Doubtful | Self::Resuming | Self::Following => Self::Resuming,
        }
    }

    /// Whether a pass may write.
    pub(super) const fn writes(self) -> bool {
        match self {
            Self::Starting | Self::Resuming | Self::Following => true,
            Self::Waiting | Self::Doubtful => false,
        }
    }
}
