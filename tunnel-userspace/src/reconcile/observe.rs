//! The published state of the owner: Services as they are programmed, counts, metrics, problems.

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
