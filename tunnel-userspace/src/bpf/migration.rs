//! Creates new maps next to those in use, of other sizes or of a newer layout. Migrates the content that
//! sockets, counters and steering addresses refer to; all other content is written again.

use std::{
    fs,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::Duration,
};

use tracing::{info, warn};
use tunnel_common::{
    service::BackendState,
    table::{self, MAPS, Map, MapGroup, ReplaceIf, Headroom},
};

use super::{
    data_path::LoadError,
    maps::{KernelMaps, KernelSteering},
    path::failed,
    pins::{Found, PinError, Pins},
    sys,
};
use crate::reconcile::{MapTooSmall, ServiceMapsSnapshot, MapSizes, SteeringMapsSnapshot, write_unused_backends};

/// The maps that a start of the daemon uses.
pub(super) enum Start {
    /// New maps, since there are none.
    New(MapSizes),
    /// The existing maps.
    Here(MapSizes),
    /// New maps, created next to the existing ones.
    Migrate(Box<Migration>),
}

/// A plan for new maps next to the existing ones.
pub(super) struct Migration {
    /// The folder of the old maps.
    from: PathBuf,
    /// The sizes of the old maps, if they have this layout. If new maps can't be created, the start
    /// continues with the old ones.
    pub(super) had: Option<MapSizes>,
    /// The sizes of the new maps.
    pub(super) sizes: MapSizes,
    /// The groups of maps that are replaced. Maps of other groups stay.
    remade: Vec<MapGroup>,
    services: Option<ServiceMapsSnapshot>,
    steering: Option<SteeringMapsSnapshot>,
}

/// Decides which maps to use. Completes an unfinished change of an earlier process first.
pub(super) fn choose(pins: &Pins, wanted: MapSizes, now: Duration) -> Result<Start, LoadError> {
    match pins.check()? {
        Found::Nothing => Ok(Start::New(wanted)),
        Found::Ours(had) if had == wanted => Ok(Start::Here(had)),
        // Programs may still use maps that an earlier start replaced. Another change now would leave three
        // maps of open connections, but only two can be added up.
        Found::Ours(had) if !pins.replaced(&pins.maps(), table::CONNS.name)?.is_empty() => {
            warn!("completing an earlier change of the maps; the sizes change at the next start");
            Ok(Start::Here(had))
        }
        Found::Ours(had) => resize(pins.maps(), had, wanted, now),
        Found::Older(from) => convert(from, wanted, now),
    }
}

/// Plans new maps of other sizes, if the content of the existing maps fits.
fn resize(from: PathBuf, had: MapSizes, wanted: MapSizes, now: Duration) -> Result<Start, LoadError> {
    let mut sizes = wanted;
    let read = || Ok(ServiceMapsSnapshot::read(&KernelMaps::open(&from)?, had)?);
    let part = (MapGroup::Services, had);
    let services = carry(part, &mut sizes, read, ServiceMapsSnapshot::fits)?;
    let steering = carry_steering(&from, had, &mut sizes, now)?;
    if sizes == had {
        return Ok(Start::Here(had));
    }
    info!(?had, ?sizes, "replacing the maps, since their sizes change");
    let parts = MapGroup::ALL.into_iter();
    Ok(Start::Migrate(Box::new(Migration {
        from,
        had: Some(had),
        sizes,
        remade: parts.filter(|part| is_other(*part, had, sizes)).collect(),
        services,
        steering,
    })))
}

/// Plans new maps to replace those of an older layout.
fn convert(from: PathBuf, wanted: MapSizes, now: Duration) -> Result<Start, LoadError> {
    let mut sizes = wanted;
    let mut remade = MapGroup::ALL.to_vec();
    let mut steering = None;
    if let (Some(entries), Some(_)) = (
        entries(&from, &table::STEER)?,
        entries(&from, &table::STEERED)?,
    ) {
        let had = MapSizes {
            steering: Headroom::Probe.size_for(entries),
            ..wanted
        };
        steering = carry_steering(&from, had, &mut sizes, now)?;
        remade.retain(|part| *part != MapGroup::Steering || is_other(*part, had, sizes));
    }
    info!(from = %from.display(), ?sizes, "replacing the maps, since they have an older layout");
    Ok(Start::Migrate(Box::new(Migration {
        from,
        had: None,
        sizes,
        remade,
        services: None,
        steering,
    })))
}

/// Returns true if the sizes of a group differ.
fn is_other(part: MapGroup, one: MapSizes, other: MapSizes) -> bool {
    one.with_group(part, other) != one
}

/// Returns the number of entries of a pinned map; none if the pin does not exist.
fn entries(folder: &Path, map: &Map) -> Result<Option<u32>, PinError> {
    let pin = folder.join(map.name);
    if !pin.exists() {
        return Ok(None);
    }
    let found = sys::open_pin(&pin).and_then(|map| sys::map_spec(map.as_fd()));
    let (_, entries) = found.map_err(failed("inspect", &pin))?;
    Ok(Some(entries))
}

fn carry_steering(
    from: &Path,
    had: MapSizes,
    sizes: &mut MapSizes,
    now: Duration,
) -> Result<Option<SteeringMapsSnapshot>, LoadError> {
    let read = || {
        Ok(SteeringMapsSnapshot::read(
            &KernelSteering::open(from)?,
            had,
            now,
        )?)
    };
    carry((MapGroup::Steering, had), sizes, read, SteeringMapsSnapshot::fits)
}

/// Reads the content of a group of maps, if a size of the group changes. If the content doesn't fit into the
/// new sizes, sets `sizes` back to the old ones for this group, and returns none.
fn carry<C>(
    (part, had): (MapGroup, MapSizes),
    sizes: &mut MapSizes,
    read: impl FnOnce() -> Result<C, LoadError>,
    fits: impl FnOnce(&C, MapSizes) -> Result<(), MapTooSmall>,
) -> Result<Option<C>, LoadError> {
    if !is_other(part, had, *sizes) {
        return Ok(None);
    }
    let carried = read()?;
    if let Err(error) = fits(&carried, *sizes) {
        if error.is_configured() {
            warn!(%error, "the new sizes are too small; the maps keep their sizes");
        } else {
            info!(
                ?had,
                "the steering maps keep their size until removed indices leave quarantine"
            );
        }
        *sizes = sizes.with_group(part, had);
        return Ok(None);
    }
    Ok(Some(carried))
}

impl Start {
    /// Returns the plan for new maps next to the existing ones, if there is one.
    pub(super) fn migration(&self) -> Option<&Migration> {
        match self {
            Self::New(_) | Self::Here(_) => None,
            Self::Migrate(migration) => Some(migration),
        }
    }
}

impl Migration {
    /// Returns true if the new maps stay empty until the sources have delivered all objects.
    pub(super) const fn is_empty(&self) -> bool {
        self.had.is_none()
    }

    /// Pins the maps that stay in use in the new folder, too.
    pub(super) fn take_along(&self, to: &Path) -> Result<(), PinError> {
        for map in MAPS {
            let is_outdated = self.is_empty() && !map.is_lasting;
            let is_new = is_outdated
                || match map.replace_if {
                    ReplaceIf::SizesChange(part) => self.remade.contains(&part),
                    // A map that is larger than needed stays, since it counts open connections.
                    ReplaceIf::TooSmall => {
                        let wanted = map.entries(self.sizes, 1);
                        entries(&self.from, map)?.is_none_or(|had| had < wanted)
                    }
                    ReplaceIf::Never => false,
                };
            let (old, new) = (self.from.join(map.name), to.join(map.name));
            if !is_new && old.exists() {
                fs::hard_link(&old, &new).map_err(failed("create another pin of", &old))?;
            }
        }
        Ok(())
    }

    /// Writes the migrated content into the new maps.
    pub(super) fn fill(&self, to: &Path, now: Duration) -> Result<(), LoadError> {
        let unused = BackendState::initial_at(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        if let Some(services) = &self.services {
            let (old, mut new) = (KernelMaps::open(&self.from)?, KernelMaps::open(to)?);
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
