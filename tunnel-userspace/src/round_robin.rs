//! Takes a limited number of items from several groups in turn, so that a large group doesn't displace the items
//! of others.

use std::collections::BTreeMap;

/// Takes the first item of each group, then the second item of each group and so on, up to `max` items. Only the
/// first `max` groups have a turn.
pub(crate) fn take<T>(groups: impl Iterator<Item = impl Iterator<Item = T>>, max: usize) -> Vec<T> {
    let mut groups: Vec<_> = groups.take(max).collect();
    let mut taken = Vec::new();
    while !groups.is_empty() {
        groups.retain_mut(|group| {
            let item = if taken.len() < max {
                group.next()
            } else {
                None
            };
            let has_item = item.is_some();
            taken.extend(item);
            has_item
        });
    }
    taken
}

/// Takes up to `max` items, in turn from each group of items that have the same key.
pub(crate) fn take_by<T, K: Ord>(
    items: impl Iterator<Item = T>,
    key: impl Fn(&T) -> K,
    max: usize,
) -> Vec<T> {
    let mut groups: BTreeMap<K, Vec<T>> = BTreeMap::new();
    for item in items {
        groups.entry(key(&item)).or_default().push(item);
    }
    take(groups.into_values().map(Vec::into_iter), max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_group_does_not_displace_the_items_of_others() {
        let groups = || [vec![1, 2, 3, 4], vec![], vec![10], vec![20, 21]].into_iter();
        let taken = |max| take(groups().map(Vec::into_iter), max);

        assert_eq!(taken(0), [0; 0]);
        // The first three groups include an empty one.
        assert_eq!(taken(3), [1, 10, 2]);
        assert_eq!(taken(4), [1, 10, 20, 2]);
        assert_eq!(taken(6), [1, 10, 20, 2, 21, 3]);
        assert_eq!(taken(100), [1, 10, 20, 2, 21, 3, 4]);
        let by_tens = take_by(groups().flatten(), |item| item / 10, 4);
        assert_eq!(by_tens, [1, 10, 20, 2]);
    }
}
