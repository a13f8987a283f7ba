//! Starts the programs that translate packets, and replaces those of an earlier process.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;
use tracing::warn;

use super::kernel_setup::KernelSetup;
use crate::{
    bpf::{self, Attachment, PinError, RcuGrace},
    clock::monotonic,
    config::{Config, DetectLocal, LinkSelection, MasqueradeAddress, SteeringConfig},
    error_chain::chain,
    model::FlowNeeds,
    net::{self, NetworkState, PacketLinks, PacketPrograms as _, PacketsView},
    tasks::Tasks,
};

/// Attaches the programs that translate packets, and starts the task that keeps them attached. If `service.packets` is off,
/// detaches those of an earlier process.
pub(super) fn start_translation(
    config: &Config,
    (kernel, attachment): (&KernelSetup, &Attachment),
    links: (watch::Receiver<NetworkState>, watch::Receiver<FlowNeeds>),
    view: watch::Sender<PacketsView>,
    tasks: &mut Tasks,
) {
    let translation = match kernel.data_path.translation() {
        Ok(translation) => translation,
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                "packets are not translated; connections of sockets are"
            );
            view.send_modify(|view| {
                view.enabled = config.service.packets.enabled;
                view.problem = Some(chain(&error));
            });
            stop_outdated_translation(kernel);
            return;
        }
    };
    bpf::release_start();
    let mut translation = translation.with_attachment(attachment.clone());
    if config.service.packets.enabled {
        let settings = packet_link_settings(config);
        let mut packets = PacketLinks::new(translation, links, settings, view);
        // No flow begins while the flows are moved, so little may remain to be done then.
        packets.prepare();
        move_flows(kernel, || {
            packets.check(false);
        });
        remove_replaced_maps(kernel);
        tasks.start("packets", packets.run(tasks.draining()));
        return;
    }
    if let Err(error) = translation.remove_unused(&BTreeMap::new()) {
        view.send_modify(|view| view.problem = Some(chain(&error)));
        let error = &error as &dyn std::error::Error;
        warn!(error, "cannot detach the programs of an earlier process");
        // No flow may begin by those that are left.
        if let Err(error) = translation.forget_other_links(&BTreeSet::new()) {
            let error = &error as &dyn std::error::Error;
            warn!(error, "packets are still translated");
        }
        stop_outdated_translation(kernel);
        return;
    }
    remove_replaced_maps(kernel);
}

fn packet_link_settings(config: &Config) -> net::PacketLinkSettings {
    let service = &config.service;
    let named = |name: &String, senders: fn(String) -> net::LocalSenders| {
        if name.is_empty() {
            net::LocalSenders::Unknown
        } else {
            senders(name.clone())
        }
    };
    let steering = config.tunnel.steering.as_ref();
    net::PacketLinkSettings {
        check_interval: config.bpf.check_interval,
        local_senders: match service.detect_local {
            DetectLocal::ClusterCidr => net::LocalSenders::ClusterRanges,
            DetectLocal::NodeCidr => net::LocalSenders::NodeRanges,
            DetectLocal::BridgeInterface => {
                named(&service.bridge_interface, net::LocalSenders::OnBridge)
            }
            DetectLocal::InterfaceNamePrefix => named(
                &service.interface_name_prefix,
                net::LocalSenders::OnInterfaces,
            ),
            DetectLocal::None => net::LocalSenders::Unknown,
        },
        uses_node_address: service.packets.address == MasqueradeAddress::Node,
        includes_pod_links: service.packets.links == LinkSelection::All,
        redirecting: service.packets.redirecting_uplinks().to_vec(),
        forwarded: steering.map_or_else(Vec::new, SteeringConfig::forwarded_ranges),
    }
}

/// Logs the failure to remove maps that have been replaced.
fn log_kept_maps(removed: Result<(), PinError>) {
    if let Err(error) = removed {
        let error = &error as &dyn std::error::Error;
        warn!(error, "cannot remove the replaced maps");
    }
}

/// Removes the maps that have been replaced. A failure is only logged.
fn remove_replaced_maps(kernel: &KernelSetup) {
    log_kept_maps(kernel.data_path.remove_replaced_maps(&kernel.pins));
}

/// Stops the programs for packets of an earlier process from using maps that have been replaced, after those of this process could
/// not be loaded. The next process moves the flows, if they must be.
fn stop_outdated_translation(kernel: &KernelSetup) {
    if let Err(error) = kernel.data_path.stop_outdated_translation(&kernel.pins) {
        let error = &error as &dyn std::error::Error;
        warn!(
            error,
            "cannot stop the programs for packets of an earlier process"
        );
    } else if kernel.data_path.moving_flows().is_none() {
        remove_replaced_maps(kernel);
    }
}

/// Attaches the programs that translate packets. If they use another map of flows than those before, moves the flows.
fn move_flows(kernel: &KernelSetup, attach: impl FnOnce()) {
    let Some(flows) = kernel.data_path.moving_flows() else {
        attach();
        return;
    };
    let attach = || {
        log_kept_maps(kernel.data_path.remove_all_but_replaced_flows(&kernel.pins));
        attach();
    };
    match RcuGrace::new() {
        Ok(grace) => flows.finish(&grace, monotonic, attach),
        Err(error) => {
            let error = &error as &dyn std::error::Error;
            warn!(
                error,
                "cannot move all flows of packets; connections may break"
            );
            attach();
        }
    }
}
