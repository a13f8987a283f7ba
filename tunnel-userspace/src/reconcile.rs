//! The owner of the maps: brings what they hold to what the plans say.
//!
//! Three rooms, which `owner` joins and `run` drives:
//!
//! - `desired`: what the sources say, as plans; which Services a change concerns (pure)
//! - `sync`: what the maps hold, and the writes that bring it to the plans, in an order that is safe at
//!   every step
//! - `observe`: what is shown of both: Services, counts, measures, problems. Others read it while the
//!   owner writes
//!
//! And beside them:
//!
//! - `access`: what is asked of the maps
//! - `aside`: work that the loop must not wait for
//! - `carry`: what maps hold, written into maps of other sizes
//! - `grace`: what was taken out of reach, until it can be freed
//! - `looks`: when it is looked for listeners of this node on addresses of Services
//! - `problems`: what is not as planned
//! - `steering`: the owner of the steering maps

mod access;
mod aside;
mod carry;
mod desired;
mod grace;
mod looks;
mod observe;
mod owner;
mod problems;
mod run;
mod steering;
mod sync;

pub use tunnel_common::table::Sizes;

pub use self::{
    access::{AdoptError, Counts, MapReader, MapWriter, ReadError, SteeringMaps, WriteError},
    aside::BrokeOff,
    carry::{CarriedServices, CarriedSteering, Misfit, write_unused},
    desired::Settings,
    grace::{Grace, Retired},
    looks::{Found, LookError},
    observe::{
        Counted, EndpointView, FrontView, Histogram, PortCounts, PortView, Published, ServiceView,
        Stats, SyncStats,
    },
    owner::Reconciler,
    problems::Problem,
    run::{Loop, Updates},
    steering::{QUARANTINE, Steering, SteeringSettings, SteeringView},
    sync::Canary,
};

#[cfg(test)]
mod tests;
