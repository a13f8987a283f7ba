//! Reference-counted lists of consecutive array entries that frontend records refer to: backend sets in the
//! array of slots, and source ranges in an array of their own.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::Hash,
    ops::Range,
    sync::{Arc, OnceLock},
};

use foldhash::{HashMap, HashMapExt as _};
use tunnel_common::service::IndexRange;

use super::allocators::{RangeAllocator, to_usize};
use crate::plan::SlotLayout;

/// The members of a backend set and the layout of its slots, from which the slots are computed. Equal recipes
/// have equal slots, as long as the backends keep their indices.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct SetRecipe {
    pub(super) layout: SlotLayout,
    /// The index and weight of each member.
    pub(super) members: Box<[(u32, u32)]>,
}

/// A list and the number of records that refer to it.
#[derive(Debug)]
struct RefCountedList<T> {
    records: u32,
    items: Arc<[T]>,
    /// The recipe of a backend set that is not plain; unset if the set was read from the maps and has not been
    /// compared with a recipe yet.
    recipe: OnceLock<Box<SetRecipe>>,
}

/// A part of the array that will be free once the lists in it have been moved elsewhere.
#[derive(Debug)]
struct HeldRange {
    /// The first index of each list that has been moved and is still to be freed.
    moved: BTreeSet<u32>,
    /// The ranges between these lists, which are kept from being allocated.
    gaps: Vec<IndexRange>,
}

/// The lists in an array map, keyed by the index of their first entry.
#[derive(Debug)]
pub(in crate::reconcile) struct RefCountedLists<T> {
    by_base: HashMap<u32, RefCountedList<T>>,
    /// The position of each list, for finding an equal one to share, or `None` if lists are not shared.
    shared: Option<HashMap<Arc<[T]>, IndexRange>>,
    free: RangeAllocator,
    held: Option<HeldRange>,
    entries: u32,
    /// The number of entries in use.
    pub(in crate::reconcile) used: u32,
}

impl<T: Eq + Hash> RefCountedLists<T> {
    /// Creates an array in which all entries are free.
    pub(super) fn new(entries: u32) -> Self {
        Self {
            by_base: HashMap::new(),
            shared: None,
            free: RangeAllocator::new(entries),
            held: None,
            entries,
            used: 0,
        }
    }

    /// Creates an array in which all entries are free and equal lists are stored only once.
    pub(super) fn new_shared(entries: u32) -> Self {
        Self {
            shared: Some(HashMap::new()),
            ..Self::new(entries)
        }
    }

    /// Reserves memory for the given number of lists, so that inserting them doesn't reallocate.
    pub(super) fn reserve(&mut self, lists: usize) {
        self.by_base.reserve(lists);
    }

    /// Reads a record's list from the map unless it is already known. Returns true if the list is valid.
    pub(super) fn read_list<E>(
        &mut self,
        range: IndexRange,
        read: impl FnOnce(Range<u32>) -> Result<Option<Vec<T>>, E>,
    ) -> Result<bool, E> {
        if range.len == 0 {
            return Ok(true);
        }
        if let Some(known) = self.by_base.get(&range.base) {
            return Ok(known.items.len() == to_usize(range.len));
        }
        let end = range.base.checked_add(range.len);
        let Some(end) = end.filter(|end| *end <= self.entries) else {
            return Ok(false);
        };
        let Some(items) = read(range.base..end)? else {
            return Ok(false);
        };
        let is_free = self.free.allocate_at(range.base, range.len);
        if is_free {
            self.insert(range, items);
        }
        Ok(is_free)
    }

    /// Returns the position of an existing list with the given items, if there is one that can be shared.
    pub(super) fn find_shared(&self, items: &[T]) -> Option<IndexRange> {
        if items.is_empty() {
            return Some(IndexRange::default());
        }
        self.shared.as_ref()?.get(items).copied()
    }

    /// Returns the list at a position, which can be shared.
    pub(super) fn shared_items(&self, range: IndexRange) -> Option<Arc<[T]>> {
        self.list_at(range).map(|list| Arc::clone(&list.items))
    }

    /// Returns the list at a position.
    pub(in crate::reconcile) fn items(&self, range: IndexRange) -> &[T] {
        self.list_at(range).map_or(&[], |list| &list.items)
    }

    /// Allocates space for a new list.
    pub(in crate::reconcile) fn allocate(&mut self, len: usize) -> Option<IndexRange> {
        let len = u32::try_from(len).ok()?;
        let base = self.free.allocate(len)?;
        Some(IndexRange { base, len })
    }

    /// Adds a list that has been written to allocated space and that no record refers to yet.
    pub(super) fn insert(&mut self, range: IndexRange, items: Vec<T>) {
        if range.len == 0 {
            return;
        }
        let items: Arc<[T]> = items.into();
        self.used += range.len;
        if let Some(shared) = &mut self.shared {
            shared.insert(Arc::clone(&items), range);
        }
        self.by_base.insert(
            range.base,
            RefCountedList {
                records: 0,
                items,
                recipe: OnceLock::new(),
            },
        );
    }

    /// Increments a list's reference count.
    pub(super) fn add_reference(&mut self, range: IndexRange) {
        if let Some(list) = self.by_base.get_mut(&range.base)
            && range.len > 0
        {
            list.records += 1;
        }
    }

    /// Decrements a list's reference count. If the count reaches 0, removes the list and returns its
    /// position, which may be freed once no program reads it any more.
    pub(super) fn remove_reference(&mut self, range: IndexRange) -> Option<IndexRange> {
        let list = self
            .by_base
            .get_mut(&range.base)
            .filter(|_| range.len > 0)?;
        list.records -= 1;
        self.remove_unused(range)
    }

    /// Removes and frees a list if no record refers to it.
    pub(super) fn free_unused(&mut self, range: IndexRange) {
        if let Some(unused) = self.remove_unused(range) {
            self.free(unused);
        }
    }

    fn remove_unused(&mut self, range: IndexRange) -> Option<IndexRange> {
        self.list_at(range).filter(|list| list.records == 0)?;
        let list = self.by_base.remove(&range.base)?;
        self.used -= range.len;
        if let Some(shared) = &mut self.shared {
            shared.remove(&list.items);
        }
        Some(range)
    }

    /// Frees the space occupied by a removed list that no program reads any more.
    pub(super) fn free(&mut self, range: IndexRange) {
        self.free.free(range.base, range.len);
        let held = self.held.take_if(|held| {
            held.moved.remove(&range.base);
            held.moved.is_empty()
        });
        self.release(held.into_iter().flat_map(|held| held.gaps));
    }

    /// Returns the free ranges in order.
    pub(super) const fn free_ranges(&self) -> &RangeAllocator {
        &self.free
    }

    /// Keeps free ranges from being allocated. Returns those that were free.
    pub(super) fn hold(&mut self, gaps: &[IndexRange]) -> Vec<IndexRange> {
        let gaps = gaps.iter().copied();
        gaps.filter(|gap| self.free.allocate_at(gap.base, gap.len))
            .collect()
    }

    /// Frees the gaps once the lists that were moved from between them have been freed.
    pub(super) fn release_after(&mut self, moved: BTreeSet<u32>, gaps: Vec<IndexRange>) {
        let earlier = self.held.replace(HeldRange { moved, gaps });
        self.release(earlier.into_iter().flat_map(|held| held.gaps));
    }

    /// Frees gaps.
    pub(super) fn release(&mut self, gaps: impl IntoIterator<Item = IndexRange>) {
        for gap in gaps {
            self.free.free(gap.base, gap.len);
        }
    }

    /// Returns how many entries would become unused without the references in `of_records`, that is, how many
    /// entries are in lists that have no other references.
    pub(super) fn unused_without(&self, of_records: impl Iterator<Item = IndexRange>) -> usize {
        let mut records = BTreeMap::<_, u32>::new();
        for range in of_records {
            *records.entry((range.base, range.len)).or_default() += 1;
        }
        let is_unused = |((base, len), records): ((u32, u32), u32)| {
            let list = self.list_at(IndexRange { base, len })?;
            (list.records == records).then_some(list.items.len())
        };
        records.into_iter().filter_map(is_unused).sum()
    }

    /// Returns each list with the index of its first entry, in array order.
    pub(in crate::reconcile) fn all(&self) -> impl Iterator<Item = (u32, &[T])> {
        let all = self.by_base.iter();
        let all: BTreeMap<_, _> = all.map(|(base, list)| (*base, &*list.items)).collect();
        all.into_iter()
    }

    /// Returns the lengths of the two largest free ranges.
    pub(in crate::reconcile) fn largest_free(&self) -> [usize; 2] {
        self.free.largest()
    }

    fn list_at(&self, range: IndexRange) -> Option<&RefCountedList<T>> {
        self.by_base.get(&range.base).filter(|_| range.len > 0)
    }
}

impl RefCountedLists<u32> {
    /// Returns true if the set at a position consists of the slots that a recipe produces. Calls `slots` to
    /// compute the slots only if it is unknown which recipe produced the set.
    pub(super) fn is_made_by<'a>(
        &self,
        range: IndexRange,
        recipe: &SetRecipe,
        slots: impl FnOnce() -> &'a Vec<u32>,
    ) -> bool {
        let Some(list) = self.list_at(range) else {
            return false;
        };
        if recipe.layout == SlotLayout::Plain {
            let indices = recipe.members.iter().map(|(index, _)| index);
            return list.items.iter().eq(indices);
        }
        if let Some(known) = list.recipe.get() {
            return **known == *recipe;
        }
        // A set of another length is not worth computing the slots. A Maglev table takes a millisecond.
        let members = recipe.members.len();
        let may_be_equal = match recipe.layout {
            SlotLayout::Maglev => list.items.len() == SlotLayout::maglev_slots(members),
            SlotLayout::Plain | SlotLayout::Weighted => list.items.len() >= members,
        };
        let is_equal = may_be_equal && **slots() == *list.items;
        if is_equal {
            let recipe = SetRecipe {
                layout: recipe.layout,
                members: recipe.members.clone(),
            };
            list.recipe.get_or_init(|| Box::new(recipe));
        }
        is_equal
    }

    /// Copies the recipe of a set to another position.
    pub(super) fn copy_recipe(&self, from: IndexRange, to: IndexRange) {
        let known = self.list_at(from).and_then(|list| list.recipe.get());
        if let Some(recipe) = known {
            let SetRecipe { layout, members } = &**recipe;
            let (layout, members) = (*layout, members.clone());
            self.set_recipe(to, SetRecipe { layout, members });
        }
    }

    /// Stores the recipe that produced the set at a position.
    pub(super) fn set_recipe(&self, range: IndexRange, recipe: SetRecipe) {
        if let Some(list) = self.list_at(range) {
            list.recipe.get_or_init(|| Box::new(recipe));
        }
    }
}
