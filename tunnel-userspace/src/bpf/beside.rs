//! Maps that are made beside those in use: of other sizes, or of a newer layout. What sockets,
//! counters and steering addresses hang on is taken along; the rest is written anew.

use std::{
    fs,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    time::Duration,
};

use tracing::{info, warn};
use tunnel_common::{names, service::State};

use super::{
    load::LoadError,
    maps::{KernelMaps, KernelSteering},
    pins::{Found, PinError, Pins, failed},
    shapes, sys,
};
use crate::reconcile::{CarriedServices, CarriedSteering, Misfit, Sizes, write_unused};

/// The maps that hang together by their indices, and are made anew together.
const SERVICES: [&str; 6] = [
    names::SVC,
    names::FRONT,
    names::SLOT,
    names::SOURCE,
    names::BE,
    names::TALLY,
];
const STEERING: [&str; 2] = [names::STEER, names::STEERED];

/// The maps that a start goes on with.
pub(super) enum Start {
    /// New ones, as there are none.
    New(Sizes),
    /// Those that are there.
    Here(Sizes),
    /// New ones beside those that are there.
    Beside(Box<Beside>),
}

/// New maps beside those that are there.
pub(super) struct Beside {
    /// Where the old ones are.
    from: PathBuf,
    /// Their sizes, if their layout is ours.
    had: Option<Sizes>,
    /// The sizes of the new ones.
    pub(super) sizes: Sizes,
    /// What is carried over. The maps that nothing is carried into are those that are there.
    services: Option<CarriedServices>,
    steering: Option<CarriedSteering>,
}

/// Decides which maps to go on with; ends what an earlier process began.
pub(super) fn choose(pins: &Pins, wanted: Sizes, now: Duration) -> Result<Start, LoadError> {
    match pins.check()? {
        Found::Nothing => Ok(Start::New(wanted)),
        Found::Ours(had) if had == wanted => Ok(Start::Here(had)),
        // Programs may still be counting in the maps that an earlier start replaced, and only two
        // such maps are added up.
        Found::Ours(had) if !pins.replaced(&pins.maps(), names::CONNS)?.is_empty() => {
            warn!("an earlier change of the maps is ended first; sizes change at the next start");
            Ok(Start::Here(had))
        }
        Found::Ours(had) => resize(pins.maps(), had, wanted, now),
        Found::Older(from) => convert(from, wanted, now),
    }
}

/// New maps of other sizes, where what is there fits into them.
fn resize(from: PathBuf, had: Sizes, wanted: Sizes, now: Duration) -> Result<Start, LoadError> {
    let mut sizes = wanted;
    let mut services = None;
    let of_services = |sizes: Sizes| (sizes.fronts, sizes.slots, sizes.sources, sizes.backends);
    if of_services(had) != of_services(wanted) {
        let carried = CarriedServices::read(&KernelMaps::open(&from)?, had)?;
        match carried.fits(wanted) {
            Ok(()) => services = Some(carried),
            Err(error) => {
                refused(&error);
                sizes = Sizes {
                    steering: wanted.steering,
                    affinity: wanted.affinity,
                    ..had
                };
            }
        }
    }
    let steering = carry_steering(&from, had.steering, &mut sizes, now)?;
    if sizes == had {
        return Ok(Start::Here(had));
    }
    info!(?had, ?sizes, "the maps are made anew, with other sizes");
    Ok(Start::Beside(Box::new(Beside {
        from,
        had: Some(had),
        sizes,
        services,
        steering,
    })))
}

/// New maps in the place of those of an older layout.
fn convert(from: PathBuf, wanted: Sizes, now: Duration) -> Result<Start, LoadError> {
    let mut sizes = wanted;
    let steering = match (
        entries(&from, names::STEER)?,
        entries(&from, names::STEERED)?,
    ) {
        (Some(steer), Some(_)) => {
            carry_steering(&from, shapes::steering_of(steer), &mut sizes, now)?
        }
        _ => None,
    };
    info!(from = %from.display(), ?sizes, "the maps are made anew, in the layout of this culvert");
    Ok(Start::Beside(Box::new(Beside {
        from,
        had: None,
        sizes,
        services: None,
        steering,
    })))
}

/// How many entries a pinned map has; nothing if there is none.
fn entries(folder: &Path, map: &str) -> Result<Option<u32>, PinError> {
    let pin = folder.join(map);
    if !pin.exists() {
        return Ok(None);
    }
    let found = sys::open_pin(&pin).and_then(|map| sys::shape(map.as_fd()));
    let shape = found.map_err(failed("look at", &pin))?;
    Ok(Some(shape.entries))
}

/// What the steering maps hold, if they are to have another size. They keep theirs where it doesn't
/// fit.
fn carry_steering(
    from: &Path,
    had: u32,
    sizes: &mut Sizes,
    now: Duration,
) -> Result<Option<CarriedSteering>, LoadError> {
    if had == sizes.steering {
        return Ok(None);
    }
    let old = Sizes {
        steering: had,
        ..*sizes
    };
    let carried = CarriedSteering::read(&KernelSteering::open(from)?, old, now)?;
    match carried.fits(*sizes) {
        Ok(()) => Ok(Some(carried)),
        Err(error) => {
            if error.is_asked_for() {
                refused(&error);
            } else {
                info!(
                    entries = had,
                    "the maps of steering keep their size while indices rest"
                );
            }
            sizes.steering = had;
            Ok(None)
        }
    }
}

fn refused(error: &Misfit) {
    warn!(%error, "the maps keep their sizes");
}

impl Start {
    /// The sizes of the maps to go on with where new ones are not to be had; nothing where there is
    /// no other way.
    pub(super) const fn otherwise(&self) -> Option<Sizes> {
        match self {
            Self::New(_) | Self::Here(_) => None,
            Self::Beside(beside) => beside.had,
        }
    }
}

impl Beside {
    /// Whether the new maps are empty until the sources have told everything.
    pub(super) const fn is_empty(&self) -> bool {
        self.had.is_none()
    }

    /// Pins the maps that are taken along in the new folder, too.
    pub(super) fn take_along(&self, to: &Path) -> Result<(), PinError> {
        let are_there = |maps: &[&str]| maps.iter().all(|map| self.from.join(map).exists());
        for map in names::MAPS {
            let is_outdated = self.is_empty() && !names::LASTING.contains(&map);
            let is_new = if is_outdated {
                true
            } else if SERVICES.contains(&map) {
                self.services.is_some()
            } else if map == names::AFFINITY {
                self.had
                    .is_none_or(|had| had.affinity != self.sizes.affinity)
            } else if map == names::CONNS {
                // A larger one stays: sockets are counted there.
                entries(&self.from, map)?.is_none_or(|had| had < self.sizes.backend_entries())
            } else {
                STEERING.contains(&map) && (self.steering.is_some() || !are_there(&STEERING))
            };
            let (old, new) = (self.from.join(map), to.join(map));
            if !is_new && old.exists() {
                fs::hard_link(&old, &new).map_err(failed("pin anew", &old))?;
            }
        }
        Ok(())
    }

    /// Writes what is carried over into the new maps.
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
