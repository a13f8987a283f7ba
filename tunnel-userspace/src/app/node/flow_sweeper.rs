//! Starts the task that sweeps the flows of translated packets.

use std::{io, iter, sync::Arc};

use tokio::sync::watch;
use tunnel_common::reason::Reason;

use super::kernel_setup::KernelSetup;
use crate::{
    admin::ListFlows,
    app::{RoleError, failed},
    config::Config,
    flows::{self, FlowSweeper, FlowsView, SweeperSettings},
    model::ObjectWarning,
    tasks::Tasks,
};

/// The published state of the flows.
pub(super) struct Flows {
    /// The number of flows, as of the last sweep.
    pub(super) view: watch::Receiver<FlowsView>,
    /// The problems that an operator must fix.
    pub(super) warnings: watch::Receiver<Arc<[ObjectWarning]>>,
    /// Lists the flows.
    pub(super) list: ListFlows,
}

/// Starts the task that sweeps the flows, unless packets are not translated.
pub(super) fn start(
    config: &Config,
    kernel: &KernelSetup,
    tasks: &mut Tasks,
) -> Result<Flows, RoleError> {
    let view = watch::Sender::default();
    let warnings = watch::Sender::new(Arc::from([]));
    let (published, reported) = (view.subscribe(), warnings.subscribe());
    if !config.service.packets.enabled {
        return Ok(Flows {
            view: published,
            warnings: reported,
            list: Box::new(|_| Box::new(iter::empty())),
        });
    }
    let map = Arc::new(kernel.flows().map_err(failed("cannot use the maps"))?);
    let counters = kernel.counters();
    let refused = move || {
        let counts = counters.read().unwrap_or_default();
        let count = counts.iter().find(|(it, _)| *it == Reason::FlowsFull);
        count.map_or(0, |(_, count)| *count)
    };
    let settings = SweeperSettings {
        timeouts: config.service.packets.timeouts.for_programs(),
        node: config.node_name.clone(),
        refused: Box::new(refused),
    };
    let sweeper = FlowSweeper::new(Arc::clone(&map), settings, view, warnings);
    tasks.start("flows", sweeper.run(tasks.draining()));
    let services = kernel.published_services();
    let list: ListFlows = Box::new(move |filter| {
        let names = services.port_names(filter.service.as_deref());
        let flows = flows::list(Arc::clone(&map), filter, names, flows::now());
        Box::new(flows.map(|flow| flow.map_err(io::Error::other)))
    });
    Ok(Flows {
        view: published,
        warnings: reported,
        list,
    })
}
