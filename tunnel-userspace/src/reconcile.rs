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

mod background_job;
mod desired_plans;
mod grace_period;
mod listener_poll;
mod map_access;
mod map_sync;
mod migrate;
mod port_problems;
mod published_state;
mod reconcile_loop;
mod reconciler;
mod steering;

pub use tunnel_common::table::MapSizes;

pub use self::{
    background_job::ThreadPanicked,
    desired_plans::PlanSettings,
    grace_period::{GracePeriod, Retired},
    listener_poll::{FindListeners, ListenerPollError},
    map_access::{
        AdoptError, CounterReader, MapReader, MapWriter, ReadError, SteeringMaps, WriteError,
    },
    map_sync::ProbeFrontend,
    migrate::{MapTooSmall, ServiceMapsSnapshot, SteeringMapsSnapshot, write_unused_backends},
    port_problems::PortProblem,
    published_state::{
        EndpointView, FrontendView, Histogram, PortCounterList, PortCounters, PortView,
        PublishedServices, ReconcileStats, ServiceView, SyncMetrics,
    },
    reconcile_loop::{ReconcileLoop, Updates},
    reconciler::Reconciler,
    steering::{QUARANTINE, SteeringReconciler, SteeringSettings, SteeringView},
};

#[cfg(test)]
mod tests;
