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

pub(super) use self::{concerns::concerns, measures::Measures, shown::show};
pub use self::{
    counted::{Counted, PortCounts},
    histogram::Histogram,
    measures::SyncStats,
    published::Published,
    stats::Stats,
    view::{EndpointView, FrontView, PortView, ServiceView},
};
