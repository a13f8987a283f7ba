//! The state that the reconciler publishes: Services with their map entries, counters, metrics and problems.
//! Other tasks can read it while the maps are being written.

mod histogram;
mod port_counters;
mod programmed_health;
mod published_services;
mod reconcile_stats;
mod service_snapshot;
mod service_view;
mod sync_metrics;
mod warnings;

pub use self::{
    histogram::Histogram,
    port_counters::{PortCounterList, PortCounters},
    published_services::{PortNames, PublishedServices},
    reconcile_stats::ReconcileStats,
    service_view::{EndpointView, FrontendView, PortView, ServicePart, ServiceView},
    sync_metrics::SyncMetrics,
};
pub(super) use self::{
    programmed_health::programmed_health, service_snapshot::publish_services,
    sync_metrics::MetricsRecorder, warnings::warnings,
};
