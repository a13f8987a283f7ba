//! New maps next to those in use: of other sizes, or of a newer layout. Maps to which sockets, counters
//! and steering addresses refer are migrated; the others are written again.

use std::{
    fs,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::Duration,
};

use tracing::{info, warn};
use tunnel_common::{
    service::State,
    table::{self, MAPS, Map, Part, Remade, Rule},
};

use super::{
    load::LoadError,
    maps::{KernelMaps, KernelSteering},
    path::failed,
    pins::{Found, PinError, Pins},
    sys,
};
use crate::reconcile::{Misfit, ServiceSnapshot, Sizes, SteeringSnapshot, write_unused};

/// The maps with which a start continues.
pub(super) enum Start {
    /// New maps, since none exist.
    New(Sizes),
    /// The existing maps.
    Here(Sizes),
    /// New maps next to the existing ones.
    Migrate(Box<Migration>),
}

/// New maps next to existing ones.
pub(super) struct Migration {
    /// The folder of the old maps.
    from: PathBuf,
    /// The sizes of the old maps, if their layout is ours: to continue with if new maps can't be
    /// created.
    pub(super) had: Option<Sizes>,
    /// The sizes of the new ones.
    pub(super) sizes: Sizes,
    /// The parts whose maps are replaced. Only their content is migrated; maps of other parts stay.
    remade: Vec<Part>,
    services: Option<ServiceSnapshot>,
    steering: Option<SteeringSnapshot>,
}

/// Decides with which maps to continue; completes the change of an earlier process.
pub(super) fn choose(pins: &Pins, wanted: Sizes, now: Duration) -> Result<Start, LoadError> {
    match pins.check()? {
        Found::Nothing => Ok(Start::New(wanted)),
        Found::Ours(had) if had == wanted => Ok(Start::Here(had)),
        // Programs may still count in the maps that an earlier start replaced, and only two such maps
        // are added.
        Found::Ours(had) if !pins.replaced(&pins.maps(), table::CONNS.name)?.is_empty() => {
            warn!("an earlier change of the maps is ended first; sizes change at the next start");
            Ok(Start::Here(had))
        }
        Found::Ours(had) => resize(pins.maps(), had, wanted, now),
        Found::Older(from) => convert(from, wanted, now),
    }
}

/// Plans new maps of other sizes, if the content of the existing ones fits.
fn resize(from: PathBuf, had: Sizes, wanted: Sizes, now: Duration) -> Result<Start, LoadError> {
    let mut sizes = wanted;
    let read = || Ok(ServiceSnapshot::read(&KernelMaps::open(&from)?, had)?);
    let part = (Part::Services, had);
    let services = carry(part, &mut sizes, read, ServiceSnapshot::fits)?;
    let steering = carry_steering(&from, had, &mut sizes, now)?;
    if sizes == had {
        return Ok(Start::Here(had));
    }
    info!(?had, ?sizes, "the maps are made anew, with other sizes");
    let parts = Part::ALL.into_iter();
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
fn convert(from: PathBuf, wanted: Sizes, now: Duration) -> Result<Start, LoadError> {
    let mut sizes = wanted;
    let mut remade = Part::ALL.to_vec();
    let mut steering = None;
    if let (Some(entries), Some(_)) = (
        entries(&from, &table::STEER)?,
        entries(&from, &table::STEERED)?,
    ) {
        let had = Sizes {
            steering: Rule::Probe.room(entries),
            ..wanted
        };
        steering = carry_steering(&from, had, &mut sizes, now)?;
        remade.retain(|part| *part != Part::Steering || is_other(*part, had, sizes));
    }
    info!(from = %from.display(), ?sizes, "the maps are made anew, in the layout of this culvert");
    Ok(Start::Migrate(Box::new(Migration {
        from,
        had: None,
        sizes,
        remade,
        services: None,
        steering,
    })))
}

/// Returns true if the sizes of a part differ.
fn is_other(part: Part, one: Sizes, other: Sizes) -> bool {
    one.with_part(part, other) != one
}

/// Returns the number of entries of a pinned map; none if it does not exist.
fn entries(folder: &Path, map: &Map) -> Result<Option<u32>, PinError> {
    let pin = folder.join(map.name);
    if !pin.exists() {
        return Ok(None);
    }
    let found = sys::open_pin(&pin).and_then(|map| sys::shape(map.as_fd()));
    let (_, entries) = found.map_err(failed("look at", &pin))?;
    Ok(Some(entries))
}

fn carry_steering(
    from: &Path,
    had: Sizes,
    sizes: &mut Sizes,
    now: Duration,
) -> Result<Option<SteeringSnapshot>, LoadError> {
    let read = || {
        Ok(SteeringSnapshot::read(
            &KernelSteering::open(from)?,
            had,
            now,
        )?)
    };
    carry((Part::Steering, had), sizes, read, SteeringSnapshot::fits)
}

/// Reads the content of a part's maps, if their sizes are to change. If it doesn't fit, the part keeps
/// its sizes.
fn carry<C>(
    (part, had): (Part, Sizes),
    sizes: &mut Sizes,
    read: impl FnOnce() -> Result<C, LoadError>,
    fits: impl FnOnce(&C, Sizes) -> Result<(), Misfit>,
) -> Result<Option<C>, LoadError> {
    if !is_other(part, had, *sizes) {
        return Ok(None);
    }
    let carried = read()?;
    if let Err(error) = fits(&carried, *sizes) {
        if error.is_asked_for() {
            warn!(%error, "the maps keep their sizes");
        } else {
            info!(
                ?had,
                "the maps of steering keep their size while indices rest"
            );
        }
        *sizes = sizes.with_part(part, had);
        return Ok(None);
    }
    Ok(Some(carried))
}

impl Start {
    /// Returns the new maps next to those in use, if there are any.
    pub(super) fn migration(&self) -> Option<&Migration> {
        match self {
            Self::New(_) | Self::Here(_) => None,
            Self::Migrate(migration) => Some(migration),
        }
    }
}

impl Migration {
    /// Returns true if the new maps are empty until the sources have delivered everything.
    pub(super) const fn is_empty(&self) -> bool {
        self.had.is_none()
    }

    /// Pins the maps that are kept in the new folder, too.
    pub(super) fn take_along(&self, to: &Path) -> Result<(), PinError> {
        for map in MAPS {
            let is_outdated = self.is_empty() && !map.lasts;
            let is_new = is_outdated
                || match map.remade {
                    Remade::With(part) => self.remade.contains(&part),
                    // A larger map stays, since it counts open sockets.
                    Remade::Larger => {
                        let wanted = map.entries(self.sizes, 1);
                        entries(&self.from, map)?.is_none_or(|had| had < wanted)
                    }
                    Remade::Never => false,
                };
            let (old, new) = (self.from.join(map.name), to.join(map.name));
            if !is_new && old.exists() {
                fs::hard_link(&old, &new).map_err(failed("pin anew", &old))?;
            }
        }
        Ok(())
    }

    /// Writes the migrated content into the new maps.
    pub(super) fn fill(&self, to: &Path, now: Duration) -> Result<(), LoadError> {
        let unused = State::unused_since(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        if let Some(services) = &self.services {
            let (old, mut new) = (KernelMaps::open(&self.from)?, KernelMaps::open(to)?);
            services.write(&old, &mut new, self.sizes, unused)?;
        } else if self.is_empty() {
            write_unused(&mut KernelMaps::open(to)?, 0, self.sizes, unused)?;
        }
        if let Some(steering) = &self.steering {
            steering.write(&mut KernelSteering::open(to)?)?;
        }
        Ok(())
    }
}
