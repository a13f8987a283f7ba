//! Owns the BPF maps, and writes them until their content is as planned.
//!
//! `reconcile_loop` waits for changes and passes them to `reconciler`, which has three parts:
//!
//! - `desired_plans`: the plans of all Services. A change updates those that depend on it
//! - `map_sync`: compares the plans with the content of the maps, and writes the differences in an order
//!   that is safe at every step
//! - `published_state`: the state that other tasks read while maps are written: Services, counters, metrics,
//!   problems
//!
//! These modules are used by the others:
//!
//! - `background_job`: a job in a thread of its own, so that the loop need not wait for it
//! - `grace_period`: removed entries that wait for an RCU grace period before they are freed
//! - `listener_poll`: polls for local listeners on addresses of Services
//! - `map_access`: the traits for reading and writing maps
//! - `migrate`: copies the content of maps into maps of other sizes
//! - `port_problems`: problems with service ports that can't be written as planned
//! - `steering`: plans steering, and writes the steering maps

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
    grace_period::{GracePeriod, RetiredEntries},
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
