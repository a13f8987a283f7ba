//! The entries to write for one service port: its plan, or the part of the plan that there is room for.

use std::{borrow::Cow, cell::OnceCell};

use litemap::LiteMap;
use tunnel_common::service::{FrontendKey, IndexRange, Membership};

use super::{actual::ActualContent, ref_counted_lists::SetRecipe};
use crate::plan::{BackendTarget, FrontendPlan, PortPlan, SlotLayout, WeightedTarget};

/// A backend to program.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct FittedBackend {
    pub(crate) target: BackendTarget,
    pub(crate) weight: u32,
    pub(crate) sets: Membership,
    /// The backend's index, if it is already in the maps.
    pub(crate) index: Option<u32>,
}

/// A backend set to program. Its members are the backends that are in the set.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum FittedSet {
    /// The set has no members.
    Empty,
    /// A set that is already in the maps.
    Existing(IndexRange),
    /// A set that must be written, with this layout.
    New(SlotLayout),
    /// A set that must be written, and that is the same one as for traffic policy `Cluster`.
    SameAsCluster,
}

impl FittedSet {
    /// Returns the set's position, unless the set must be written first.
    pub(crate) fn existing(self) -> Option<IndexRange> {
        match self {
            Self::Empty => Some(IndexRange::default()),
            Self::Existing(range) => Some(range),
            Self::New(_) | Self::SameAsCluster => None,
        }
    }
}

/// The entries to write for one service port.
#[derive(Debug)]
pub(crate) struct FittedPlan<'a> {
    /// The plan, from which all settings come that need no entries.
    pub(crate) plan: Cow<'a, PortPlan>,
    /// The frontends that there is room for; `None` if these are all frontends in the plan.
    pub(crate) fitting_frontends: Option<LiteMap<FrontendKey, FrontendPlan>>,
    /// Frontends to remove before new ones are written, because the map has no room for both.
    pub(crate) abandoned: Vec<FrontendKey>,
    /// In ascending order of address and port.
    pub(crate) backends: Vec<FittedBackend>,
    pub(crate) cluster: FittedSet,
    pub(crate) local: FittedSet,
}

impl FittedPlan<'_> {
    /// Returns a plan without entries, for removing all entries of a port.
    pub(crate) fn empty() -> Self {
        Self {
            plan: Cow::Owned(PortPlan::default()),
            fitting_frontends: None,
            abandoned: Vec::new(),
            backends: Vec::new(),
            cluster: FittedSet::Empty,
            local: FittedSet::Empty,
        }
    }

    /// Returns the frontends to program.
    pub(crate) fn frontends(&self) -> &LiteMap<FrontendKey, FrontendPlan> {
        let fitting = self.fitting_frontends.as_ref();
        fitting.unwrap_or(&self.plan.frontends)
    }

    /// Returns the backend with this address and port, if it is to be programmed.
    pub(crate) fn backend(&self, target: &BackendTarget) -> Option<&FittedBackend> {
        let backends = &self.backends;
        let position = backends.binary_search_by_key(target, |backend| backend.target);
        backends.get(position.ok()?)
    }

    /// Returns the members of a set, in order.
    pub(crate) fn members(&self, set: Membership) -> impl Iterator<Item = &FittedBackend> {
        members(&self.backends, set)
    }
}

/// Returns the backends that are in a set.
pub(super) fn members(
    backends: &[FittedBackend],
    set: Membership,
) -> impl Iterator<Item = &FittedBackend> {
    backends
        .iter()
        .filter(move |backend| backend.sets.includes(set))
}

/// Returns the members of a set with their weights.
pub(super) fn weighted_members(backends: &[FittedBackend], set: Membership) -> Vec<WeightedTarget> {
    let members = members(backends, set);
    members
        .map(|backend| (backend.target, backend.weight))
        .collect()
}

/// Returns the position of a set in the maps that is equal to the set of these backends with this layout.
/// The set of either traffic policy is used for both, if it is equal.
pub(super) fn find_existing(
    actual: &ActualContent,
    id: u32,
    backends: &[FittedBackend],
    set: Membership,
    layout: SlotLayout,
) -> Option<IndexRange> {
    // A port without records is common while many Services are added.
    actual.records_of(id).next()?;
    let members = members(backends, set);
    let recipe = members.map(|backend| Some((backend.index?, backend.weight)));
    let recipe = SetRecipe {
        layout,
        members: recipe.collect::<Option<Box<[_]>>>()?,
    };
    let mut candidates: Vec<IndexRange> = Vec::new();
    // The policy's own set comes first, so that sets that are already in the maps don't change.
    for is_own in [true, false] {
        let is_local = set.equals(Membership::LOCAL) == is_own;
        for record in actual.records_of(id) {
            let range = if is_local {
                record.local
            } else {
                record.cluster
            };
            if range.len > 0 && !candidates.contains(&range) {
                candidates.push(range);
            }
        }
    }
    let computed = OnceCell::new();
    let slots = || {
        computed.get_or_init(|| {
            let members = weighted_members(backends, set);
            let slots = layout.distribute(&members).into_iter();
            let index = |member: usize| Some(recipe.members.get(member)?.0);
            slots.filter_map(index).collect()
        })
    };
    let is_equal = |range: &IndexRange| actual.sets.is_made_by(*range, &recipe, slots);
    candidates.into_iter().find(is_equal)
}
