//! An adaptive read size: small for slow senders, large for fast ones.

/// The minimum read size, in bytes.
const MIN: usize = 4 << 10;
/// The maximum read size, in bytes.
const MAX: usize = 128 << 10;

/// The size of the next read, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadSize(usize);

impl Default for ReadSize {
    fn default() -> Self {
        Self(MIN)
    }
}

impl ReadSize {
    pub(super) const fn bytes(self) -> usize {
        self.0
    }

    /// Grows or shrinks the read size after a read has returned `read` bytes.
    pub(super) fn adapt(&mut self, read: usize) {
        if read >= self.0 {
            self.0 = (self.0 * 4).min(MAX);
        } else if read < self.0 / 8 {
            self.0 = (self.0 / 2).max(MIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_reads_grow_the_size_and_small_ones_shrink_it_within_bounds() {
        let mut size = ReadSize::default();
        for _ in 0..9 {
            size.adapt(size.bytes());
        }
        assert_eq!(size.bytes(), MAX);

        for _ in 0..9 {
            size.adapt(1);
        }
        assert_eq!(size.bytes(), MIN);
    }
}
