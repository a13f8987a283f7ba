//! The adaptive size of reads: small for slow senders, large for fast ones.

/// The minimum size, in bytes.
const LEAST: usize = 4 << 10;
/// The maximum size, in bytes.
const MOST: usize = 128 << 10;

/// The size of the next read, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size(usize);

impl Default for Size {
    fn default() -> Self {
        Self(LEAST)
    }
}

impl Size {
    pub(super) const fn bytes(self) -> usize {
        self.0
    }

    /// Grows or shrinks the size after a read that returned `read` bytes.
    pub(super) fn learn(&mut self, read: usize) {
        if read >= self.0 {
            self.0 = (self.0 * 4).min(MOST);
        } else if read < self.0 / 8 {
            self.0 = (self.0 / 2).max(LEAST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_reads_grow_it_and_small_ones_shrink_it_within_bounds() {
        let mut size = Size::default();
        for _ in 0..9 {
            size.learn(size.bytes());
        }
        assert_eq!(size.bytes(), MOST);

        for _ in 0..9 {
            size.learn(1);
        }
        assert_eq!(size.bytes(), LEAST);
    }
}
