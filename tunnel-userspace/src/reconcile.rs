//! Owns the BPF maps and keeps writing to them until their contents match the plans.
//!
//! `reconcile_loop` waits for changes and passes them to `reconciler`, which has three parts:
//!
//! - `desired_plans`: holds the plans for all Services, and updates only those that a change affects
//! - `map_sync`: compares the plans with the contents of the maps and writes the differences, in an order
//!   that is safe at every step
//! - `published_state`: publishes Services, counters, metrics and problems, which other tasks can read while
//!   the maps are being written
//!
//! These modules support the others:
//!
//! - `cluster_addresses`: writes which addresses are cluster IPs
//! - `background_job`: runs a job on its own thread, so that the loop need not wait for it
//! - `grace_period`: holds removed entries until an RCU grace period has passed and they can be freed
//! - `held_addresses_file`: saves which edge node holds each address
//! - `listener_log`: logs listeners that are ignored, at a limited rate
//! - `listener_poll`: polls for local processes that listen on a Service's address
//! - `map_access`: defines the traits for reading and writing maps
//! - `migrate`: copies the contents of maps into maps of different sizes
//! - `periodic_probe`: the test connections while the daemon runs
//! - `port_problems`: tracks the service ports that can't be programmed as planned
//! - `refused_retries`: spreads the retries of very many Services that did not fit into the maps over time
//! - `steering`: plans steering and writes the steering maps
//! - `timers`: the timers of `reconcile_loop`

mod background_job;
mod cluster_addresses;
mod desired_plans;
mod grace_period;
mod held_addresses_file;
mod listener_log;
mod listener_poll;
mod map_access;
mod map_sync;
mod migrate;
mod periodic_probe;
mod port_problems;
mod published_state;
mod reconcile_loop;
mod reconciler;
mod refused_retries;
mod steering;
mod timers;

pub use tunnel_common::table::MapSizes;

pub use self::{
    background_job::ThreadPanicked,
    cluster_addresses::{AddressMaps, ClusterAddresses},
    desired_plans::PlanSettings,
    grace_period::{GracePeriod, RetiredEntries},
    held_addresses_file::{
        SavedHolders, held_addresses_path, read_held_addresses, save_held_addresses,
    },
    listener_poll::{FindListeners, ListenerPollError, ListeningUsers},
    map_access::{
        AdoptError, CounterReader, MapReader, MapWriter, ReadError, SteeringMaps, WriteError,
    },
    map_sync::ProbeFrontend,
    migrate::{MapTooSmall, ServiceMapsSnapshot, SteeringMapsSnapshot, write_unused_backends},
    periodic_probe::DialProbe,
    port_problems::PortProblem,
    published_state::{
        EndpointView, FrontendView, Histogram, PortCounterList, PortCounters, PortNames, PortView,
        PublishedServices, ReconcileStats, ServicePart, ServiceView, SyncMetrics,
    },
    reconcile_loop::{ReconcileLoop, Updates},
    reconciler::Reconciler,
    steering::{QUARANTINE, SteeringReconciler, SteeringSettings, SteeringView},
};

#[cfg(test)]
mod tests;
