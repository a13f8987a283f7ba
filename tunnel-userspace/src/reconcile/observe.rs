//! The published state of the reconciler: Services with their map entries, counters, metrics, problems. Other
//! tasks read it while maps are written.

mod concerns;
mod counted;
mod histogram;
mod measures;
mod published;
mod shown;
mod stats;
mod view;

pub(super) use self::{concerns::concerns, measures::MetricsRecorder, shown::publish_services};
pub use self::{
    counted::{PortCounterList, PortCounters},
    histogram::Histogram,
    measures::SyncMetrics,
    published::PublishedServices,
    stats::ReconcileStats,
    view::{EndpointView, FrontendView, PortView, ServiceView},
};
