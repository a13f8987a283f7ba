//! The owner of the maps: brings what they hold to what the plans say.
//!
//! Three rooms, which `reconciler` joins and `run` drives:
//!
//! - `desired`: the plans of all Services, kept up to date; `plan` computes each (pure)
//! - `sync`: what the maps hold, and the writes that bring it to the plans, in an order that is safe at
//!   every step
//! - `observe`: what is shown of both: Services, counts, measures, problems. Others read it while the
//!   owner writes
//!
//! And beside them:
//!
//! - `access`: what is asked of the maps
//! - `background`: work that the loop must not wait for
//! - `grace`: what was taken out of reach, until it can be freed
//! - `listener_poll`: polls for listeners of this node on addresses of Services
//! - `migrate`: what maps hold, written into maps of other sizes
//! - `problems`: what is not as planned
//! - `steering`: the owner of the steering maps

mod access;
mod background;
mod desired;
mod grace;
mod listener_poll;
mod migrate;
mod observe;
mod problems;
mod reconciler;
mod run;
mod steering;
mod sync;

pub use tunnel_common::table::Sizes;

pub use self::{
    access::{AdoptError, Counts, MapReader, MapWriter, ReadError, SteeringMaps, WriteError},
    background::BrokeOff,
    desired::Settings,
    grace::{Grace, Retired},
    listener_poll::{Found, LookError},
    migrate::{Misfit, ServiceSnapshot, SteeringSnapshot, write_unused},
    observe::{
        Counted, EndpointView, FrontView, Histogram, PortCounts, PortView, Published, ServiceView,
        Stats, SyncStats,
    },
    problems::Problem,
    reconciler::Reconciler,
    run::{Loop, Updates},
    steering::{QUARANTINE, Steering, SteeringSettings, SteeringView},
    sync::Canary,
};

#[cfg(test)]
mod tests;
