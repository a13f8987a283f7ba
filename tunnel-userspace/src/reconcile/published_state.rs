//! The published state of the reconciler: Services with their map entries, counters, metrics, problems. Other
//! tasks read it while maps are written.

mod histogram;
mod port_counters;
mod published_services;
mod reconcile_stats;
mod service_snapshot;
mod service_view;
mod sync_metrics;
mod warnings;

pub use self::{
    histogram::Histogram,
    port_counters::{PortCounterList, PortCounters},
    published_services::PublishedServices,
    reconcile_stats::ReconcileStats,
    service_view::{EndpointView, FrontendView, PortView, ServiceView},
    sync_metrics::SyncMetrics,
};
pub(super) use self::{
    service_snapshot::publish_services, sync_metrics::MetricsRecorder, warnings::warnings,
};
