//! Starts the task that sweeps the flows of translated packets.

use std::{io, iter, sync::Arc};

use tokio::sync::watch;
use tracing::warn;
use tunnel_common::reason::Reason;

use super::kernel_setup::KernelSetup;
use crate::{
    admin::ListFlows,
    app::{RoleError, failed},
    config::Config,
    drain,
    error_chain::chain,
    flows::{self, FlowMap, FlowSweeper, FlowsView, SweeperSettings},
    model::{FlowNeeds, ObjectWarning},
    net::PacketsView,
    tasks::Tasks,
    tunnel::FindDialled,
};

/// The published state of the flows.
pub(super) struct Flows {
    /// The number of flows, as of the last sweep.
    pub(super) view: watch::Receiver<FlowsView>,
    /// The problems that an operator must fix.
    pub(super) warnings: watch::Receiver<Arc<[ObjectWarning]>>,
    /// The needs of the flows.
    pub(super) needs: watch::Receiver<FlowNeeds>,
    /// Lists the flows.
    pub(super) list: ListFlows,
    /// Finds what clients of the ingress have dialled.
    pub(super) find_dialled: FindDialled,
}

/// Starts the task that sweeps the flows, unless packets are not translated. It begins once the programs are attached: until
/// then, flows may still move to another map.
pub(super) fn start(
    config: &Config,
    kernel: &KernelSetup,
    mut packets: watch::Receiver<PacketsView>,
    tasks: &mut Tasks,
) -> Result<Flows, RoleError> {
    let view = watch::Sender::default();
    let warnings = watch::Sender::new(Arc::from([]));
    let needs = watch::Sender::default();
    let (published, reported) = (view.subscribe(), warnings.subscribe());
    let needed = needs.subscribe();
    if !config.service.packets.enabled {
        return Ok(Flows {
            view: published,
            warnings: reported,
            needs: needed,
            list: Box::new(|_| Box::new(iter::empty())),
            find_dialled: Arc::new(|_, _| None),
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
    let sweeper = FlowSweeper::new(Arc::clone(&map), settings, (view, warnings, needs));
    let (draining, mut stopped) = (tasks.draining(), tasks.draining());
    tasks.start("flows", async move {
        tokio::select! {
            () = drain::begun(&mut stopped) => return,
            // Without a sender, the daemon stops.
            _ = packets.wait_for(|view| view.enabled) => {}
        }
        sweeper.run(draining).await;
    });
    let find_dialled = find_dialled_in(Arc::clone(&map));
    let services = kernel.published_services();
    let list: ListFlows = Box::new(move |filter| {
        let names = services.port_names(filter.service.as_deref());
        let flows = flows::list(Arc::clone(&map), filter, names, flows::now());
        Box::new(flows.map(|flow| flow.map_err(io::Error::other)))
    });
    Ok(Flows {
        view: published,
        warnings: reported,
        needs: needed,
        list,
        find_dialled,
    })
}

/// Returns a function that looks up what clients of the ingress have dialled.
fn find_dialled_in(map: Arc<impl FlowMap>) -> FindDialled {
    Arc::new(move |client, ingress| {
        flows::dialled_by(&*map, client, ingress).unwrap_or_else(|error| {
            warn!(error = chain(&error), %client, "cannot look up a connection to the ingress");
            None
        })
    })
}
