//! The owner of the maps: writes the maps until their content is as planned.
//!
//! Three parts, which `reconciler` joins and `run` drives:
//!
//! - `desired`: the plans of all Services, kept up to date; `plan` computes each (pure)
//! - `sync`: the content of the maps, and the writes that bring it to the plans, in an order that is
//!   safe at every step
//! - `observe`: the published state of both: Services, counts, metrics, problems. Readers use it while
//!   the owner writes
//!
//! Modules that these use:
//!
//! - `access`: the traits for reading and writing maps
//! - `background`: work for which the loop must not wait
//! - `grace`: entries that wait for an RCU grace period before they are freed
//! - `listener_poll`: polls for listeners of this node on addresses of Services
//! - `migrate`: the content of maps, written into maps of other sizes
//! - `problems`: deviations from the plans
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

pub use tunnel_common::table::MapSizes;

pub use self::{
    access::{AdoptError, CounterReader, MapReader, MapWriter, ReadError, SteeringMaps, WriteError},
    background::ThreadPanicked,
    desired::PlanSettings,
    grace::{GracePeriod, Retired},
    listener_poll::{FindListeners, ListenerPollError},
    migrate::{MapTooSmall, ServiceMapsSnapshot, SteeringMapsSnapshot, write_unused_backends},
    observe::{
        PortCounterList, EndpointView, FrontendView, Histogram, PortCounters, PortView, PublishedServices, ServiceView,
        ReconcileStats, SyncMetrics,
    },
    problems::PortProblem,
    reconciler::Reconciler,
    run::{ReconcileLoop, Updates},
    steering::{QUARANTINE, SteeringReconciler, SteeringSettings, SteeringView},
    sync::ProbeFrontend,
};

#[cfg(test)]
mod tests;
