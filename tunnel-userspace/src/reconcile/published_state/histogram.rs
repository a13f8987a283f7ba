/// A histogram of durations in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// The upper bound of each bucket and the number of values in that bucket. The numbers are not
    /// cumulative, and the last bucket's bound is infinite.
    pub(crate) buckets: Vec<(f64, u64)>,
    /// The sum of all values.
    pub(crate) sum: f64,
}

impl Histogram {
    /// Creates a histogram with the given upper bounds, which must be in ascending order, plus a last bucket
    /// with no upper bound.
    pub(super) fn new(bounds: impl IntoIterator<Item = f64>) -> Self {
        let bounds = bounds.into_iter().chain([f64::INFINITY]);
        Self {
            buckets: bounds.map(|bound| (bound, 0)).collect(),
            sum: 0.0,
        }
    }

    /// Adds a value.
    pub(super) fn observe(&mut self, value: f64) {
        let bucket = self.buckets.partition_point(|(bound, _)| *bound < value);
        if let Some((_, count)) = self.buckets.get_mut(bucket) {
            *count += 1;
            self.sum += value;
        }
    }

    /// Returns the number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_counted_in_the_first_bucket_whose_bound_is_not_smaller() {
        let mut histogram = Histogram::new([1.0, 2.0]);
        for value in [0.0, 1.0, 1.5, 2.0, 2.5, 1e9] {
            histogram.observe(value);
        }

        assert_eq!(histogram.buckets, [(1.0, 2), (2.0, 2), (f64::INFINITY, 2)]);
        assert_eq!(histogram.count(), 6);
        assert!((histogram.sum - 1_000_000_007.0).abs() < 1e-6);
    }
}
