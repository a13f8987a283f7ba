//! The published state of the reconciler: Services with their map entries, counters, metrics, problems. Other
//! tasks read it while maps are written.

mod warnings;
mod port_counters;
mod histogram;
mod sync_metrics;
mod published_services;
mod service_snapshot;
mod reconcile_stats;
mod service_view;

pub(super) use self::{warnings::warnings, sync_metrics::MetricsRecorder, service_snapshot::publish_services};
pub use self::{
    port_counters::{PortCounterList, PortCounters},
    histogram::Histogram,
    sync_metrics::SyncMetrics,
    published_services::PublishedServices,
    reconcile_stats::ReconcileStats,
    service_view::{EndpointView, FrontendView, PortView, ServiceView},
};
