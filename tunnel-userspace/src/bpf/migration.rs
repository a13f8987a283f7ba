//! Creates new maps, with other sizes or a newer layout, next to those in use. Migrates the entries that
//! sockets, counters and steering addresses refer to; all other entries are written again from scratch.

use std::{
    fs,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::Duration,
};

use tracing::{info, warn};
use tunnel_common::{
    service::BackendState,
    table::{self, Headroom, MAPS, Map, MapGroup, ReplaceIf},
};

use super::{
    data_path::LoadError,
    maps::{KernelMaps, KernelSteering},
    moving_flows::MovingFlows,
    path::failed,
    pin_directory::{ExistingMaps, PinDirectory, PinError},
    sys,
};
use crate::reconcile::{
    MapSizes, MapTooSmall, ServiceMapsSnapshot, SteeringMapsSnapshot, write_unused_backends,
};

/// The maps that the daemon starts with.
pub(super) enum StartMaps {
    /// New maps, since none exist.
    New(MapSizes),
    /// The existing maps.
    Existing(MapSizes),
    /// New maps, created next to the existing ones.
    Migrate(Box<Migration>),
}

/// A plan for creating new maps next to the existing ones.
pub(super) struct Migration {
    /// The directory that holds the old maps.
    old_directory: PathBuf,
    /// The sizes of the old maps, or `None` if these have an older layout. If the sizes are known and new
    /// maps can't be created, the daemon starts with the old maps.
    pub(super) old_sizes: Option<MapSizes>,
    /// The sizes of the new maps.
    pub(super) sizes: MapSizes,
    /// The map groups to replace. Maps in other groups are kept.
    replaced_groups: Vec<MapGroup>,
    services: Option<ServiceMapsSnapshot>,
    steering: Option<SteeringMapsSnapshot>,
}

/// Decides which maps to use. First completes any change that an earlier process left unfinished.
pub(super) fn plan(
    pins: &PinDirectory,
    wanted: MapSizes,
    now: Duration,
) -> Result<StartMaps, LoadError> {
    match pins.check()? {
        ExistingMaps::None => Ok(StartMaps::New(wanted)),
        ExistingMaps::Current(current) if current == wanted => Ok(StartMaps::Existing(current)),
        // Programs may still use maps that were replaced when the daemon last started. Another change now
        // would leave three maps with counts of open connections, but only two can be added up; and three with flows.
        ExistingMaps::Current(current) if has_replaced(pins)? => {
            warn!("completing an earlier change of the maps; the sizes change at the next start");
            Ok(StartMaps::Existing(current))
        }
        ExistingMaps::Current(current) => plan_resize(pins.maps(), current, wanted, now),
        ExistingMaps::Older(directory) => plan_conversion(directory, wanted, now),
    }
}

/// Returns true if there are maps that were replaced, but that programs may still use.
fn has_replaced(pins: &PinDirectory) -> Result<bool, PinError> {
    for map in [table::CONNS, table::FLOWS] {
        if !pins.replaced(&pins.maps(), map.name)?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Plans new maps with other sizes, if the contents of the existing maps fit into them.
fn plan_resize(
    old_directory: PathBuf,
    old_sizes: MapSizes,
    wanted: MapSizes,
    now: Duration,
) -> Result<StartMaps, LoadError> {
    let mut sizes = wanted;
    let read = || {
        Ok(ServiceMapsSnapshot::read(
            &KernelMaps::open(&old_directory)?,
            old_sizes,
        )?)
    };
    let group = (MapGroup::Services, old_sizes);
    let services = read_if_resized(group, &mut sizes, read, ServiceMapsSnapshot::fits)?;
    let steering = read_steering_if_resized(&old_directory, old_sizes, &mut sizes, now)?;
    if sizes == old_sizes {
        return Ok(StartMaps::Existing(old_sizes));
    }
    info!(
        ?old_sizes,
        ?sizes,
        "replacing the maps, since their sizes change"
    );
    let groups = MapGroup::ALL.into_iter();
    Ok(StartMaps::Migrate(Box::new(Migration {
        old_directory,
        old_sizes: Some(old_sizes),
        sizes,
        replaced_groups: groups
            .filter(|group| sizes_differ(*group, old_sizes, sizes))
            .collect(),
        services,
        steering,
    })))
}

/// Plans new maps to replace those with an older layout.
fn plan_conversion(
    old_directory: PathBuf,
    wanted: MapSizes,
    now: Duration,
) -> Result<StartMaps, LoadError> {
    let mut sizes = wanted;
    let mut replaced_groups = MapGroup::ALL.to_vec();
    let mut steering = None;
    if let (Some(entries), Some(_)) = (
        pinned_entries(&old_directory, &table::STEER)?,
        pinned_entries(&old_directory, &table::STEERED)?,
    ) {
        let old_sizes = MapSizes {
            steering: Headroom::Probe.size_for(entries),
            ..wanted
        };
        steering = read_steering_if_resized(&old_directory, old_sizes, &mut sizes, now)?;
        let is_replaced =
            |group| group != MapGroup::Steering || sizes_differ(group, old_sizes, sizes);
        replaced_groups.retain(|group| is_replaced(*group));
    }
    let flows = pinned_entries(&old_directory, &table::FLOWS)?;
    if flows == Some(table::FLOWS.entries(sizes, 1)) {
        replaced_groups.retain(|group| *group != MapGroup::Flows);
    }
    info!(from = %old_directory.display(), ?sizes, "replacing the maps, since they have an older layout");
    Ok(StartMaps::Migrate(Box::new(Migration {
        old_directory,
        old_sizes: None,
        sizes,
        replaced_groups,
        services: None,
        steering,
    })))
}

/// Returns true if `one` and `other` have different sizes for a group.
fn sizes_differ(group: MapGroup, one: MapSizes, other: MapSizes) -> bool {
    one.with_group(group, other) != one
}

/// Returns the maximum number of entries in a pinned map; `None` if there is no such pin.
fn pinned_entries(directory: &Path, map: &Map) -> Result<Option<u32>, PinError> {
    let pin = directory.join(map.name);
    if !pin.exists() {
        return Ok(None);
    }
    let found = sys::open_pin(&pin).and_then(|map| sys::map_spec(map.as_fd()));
    let (_, entries) = found.map_err(failed("inspect", &pin))?;
    Ok(Some(entries))
}

/// Reads the contents of the steering maps, if their size changes and the contents fit the new size.
fn read_steering_if_resized(
    old_directory: &Path,
    old_sizes: MapSizes,
    sizes: &mut MapSizes,
    now: Duration,
) -> Result<Option<SteeringMapsSnapshot>, LoadError> {
    let read = || {
        Ok(SteeringMapsSnapshot::read(
            &KernelSteering::open(old_directory)?,
            old_sizes,
            now,
        )?)
    };
    read_if_resized(
        (MapGroup::Steering, old_sizes),
        sizes,
        read,
        SteeringMapsSnapshot::fits,
    )
}

/// Reads the contents of a group of maps, if one of the group's sizes changes. If the contents don't fit the
/// new sizes, resets this group's sizes in `sizes` to the old ones and returns `None`.
fn read_if_resized<C>(
    (group, old_sizes): (MapGroup, MapSizes),
    sizes: &mut MapSizes,
    read: impl FnOnce() -> Result<C, LoadError>,
    fits: impl FnOnce(&C, MapSizes) -> Result<(), MapTooSmall>,
) -> Result<Option<C>, LoadError> {
    if !sizes_differ(group, old_sizes, *sizes) {
        return Ok(None);
    }
    let content = read()?;
    if let Err(error) = fits(&content, *sizes) {
        if error.is_configured() {
            warn!(%error, "the new sizes are too small; the maps keep their sizes");
        } else {
            info!(
                ?old_sizes,
                "the steering maps keep their size until removed indices leave quarantine"
            );
        }
        *sizes = sizes.with_group(group, old_sizes);
        return Ok(None);
    }
    Ok(Some(content))
}

impl StartMaps {
    /// Returns the plan for creating new maps next to the existing ones, if there is one.
    pub(super) fn migration(&self) -> Option<&Migration> {
        match self {
            Self::New(_) | Self::Existing(_) => None,
            Self::Migrate(migration) => Some(migration),
        }
    }
}

impl Migration {
    /// Returns true if the new maps stay empty until the sources have delivered all objects.
    pub(super) const fn is_empty(&self) -> bool {
        self.old_sizes.is_none()
    }

    /// Adds pins in the new directory `to` for the maps that are kept.
    pub(super) fn pin_kept_maps(&self, to: &Path) -> Result<(), PinError> {
        for map in MAPS {
            let is_outdated = self.is_empty() && !map.is_lasting;
            let is_new = is_outdated
                || match map.replace_if {
                    ReplaceIf::SizesChange(group) => self.replaced_groups.contains(&group),
                    // A map that is larger than needed is kept, since it counts open connections.
                    ReplaceIf::TooSmall => {
                        let wanted = map.entries(self.sizes, 1);
                        pinned_entries(&self.old_directory, map)?
                            .is_none_or(|current| current < wanted)
                    }
                    ReplaceIf::Never => false,
                };
            let (old, new) = (self.old_directory.join(map.name), to.join(map.name));
            if !is_new && old.exists() {
                fs::hard_link(&old, &new).map_err(failed("create another pin of", &old))?;
            }
        }
        Ok(())
    }

    /// Begins to move the flows to the new map of flows, if it replaces one. A failure is only logged.
    pub(super) fn move_flows(&self, to: &Path) -> Option<MovingFlows> {
        let is_moved = self.replaced_groups.contains(&MapGroup::Flows)
            && self.old_directory.join(table::FLOWS.name).exists();
        if !is_moved {
            return None;
        }
        MovingFlows::begin(&self.old_directory, to)
            .inspect_err(|error| {
                let error = error as &dyn std::error::Error;
                warn!(
                    error,
                    "cannot move the flows of packets; their connections break"
                );
            })
            .ok()
    }

    /// Writes the migrated contents to the new maps.
    pub(super) fn fill(&self, to: &Path, now: Duration) -> Result<(), LoadError> {
        let unused = BackendState::initial_at(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        if let Some(services) = &self.services {
            let (old, mut new) = (
                KernelMaps::open(&self.old_directory)?,
                KernelMaps::open(to)?,
            );
            services.write(&old, &mut new, self.sizes, unused)?;
        } else if self.is_empty() {
            write_unused_backends(&mut KernelMaps::open(to)?, 0, self.sizes, unused)?;
        }
        if let Some(steering) = &self.steering {
            steering.write(&mut KernelSteering::open(to)?)?;
        }
        Ok(())
    }
}
