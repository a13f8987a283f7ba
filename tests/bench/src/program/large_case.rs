//! The large case: starting a daemon with manifests for many Services, in JSON or in YAML, compared with
//! loading nftables rules like kube-proxy's for fewer Services.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tunnel_common::table::MapSizes;
use tunnel_tests::{
    address::nth_address,
    clock,
    culvert_instance::InstanceSettings,
    kube_proxy_rules::{ServiceSet, nft},
    manifest::{Manifest, Protocol},
    node_network::NodeNetwork,
    process_usage,
};

use super::{
    Options,
    probe::{self, Change, PORT},
};
use crate::{
    report::run_rounds,
    services::{FIRST_CLUSTER_IP, service_files},
};

/// The first endpoint's address. No two endpoints have the same address.
const ENDPOINTS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 128, 0, 0));

/// The number of endpoints per Service.
pub(super) const ENDPOINTS_PER_SERVICE: u32 = 4;

/// The number of evenly spaced Services that are probed. The BPF programs are attached after the last write
/// to the maps, so even one translated Service proves that all of them have been written.
const PROBED_SERVICES: u32 = 200;

/// The pause after a variant with rules. The kernel frees the rules in the background, which must not slow
/// down the next variant.
const PAUSE_AFTER_RULES: Duration = Duration::from_secs(3);

/// The number of file changes made for each change to the rules. Changes to the rules are fewer because each
/// takes long.
const RULE_CHANGE_DIVISOR: u32 = 5;

/// A variant of the large case: the format in which the Services are given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Variant {
    Json,
    Yaml,
    /// `nft -f`, with rules for this many Services.
    Rules(u32),
}

/// A variant's measurements in one round.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// The time from the start until all Services are translated or all rules are loaded.
    pub(super) total: Duration,
    /// The part of `total` from when the objects have been parsed until the maps are complete.
    pub(super) write: Duration,
    /// The daemon's peak resident memory, in bytes.
    pub(super) peak: u64,
    pub(super) changes: Vec<Change>,
}

/// Measures each variant once per round, in shuffled order. Each round's samples are returned in the order of
/// `variants`.
pub(super) fn measure(options: &Options, variants: &[Variant]) -> Result<Vec<Vec<Sample>>> {
    run_rounds(options.starts, variants, |variant| match *variant {
        Variant::Json => measure_files(options, json_files(options.many)?),
        Variant::Yaml => measure_files(options, yaml_files(options.many)),
        Variant::Rules(services) => {
            let sample = measure_rules(options, services)
                .with_context(|| format!("nft, with {services} Services"))?;
            clock::pause(PAUSE_AFTER_RULES);
            Ok(sample)
        }
    })
}

/// Measures the start of a daemon with the given files, and then a series of changes.
fn measure_files(options: &Options, files: Vec<Manifest>) -> Result<Sample> {
    let capacity = options.many.saturating_mul(2);
    let settings = InstanceSettings {
        maps: MapSizes {
            frontends: capacity,
            slots: capacity.saturating_mul(ENDPOINTS_PER_SERVICE),
            backends: capacity.saturating_mul(ENDPOINTS_PER_SERVICE),
            ..MapSizes::default()
        },
        ..options.common.settings()?
    };
    let node = probe::create_node(settings)?;
    for file in files {
        node.apply(file)?;
    }
    let step = usize::try_from((options.many / PROBED_SERVICES).max(1))?;
    let last = options.many.saturating_sub(1);
    let probed = (0..options.many).step_by(step).chain([last]);
    let total = probe::start_daemon(
        &node,
        probed.map(|number| nth_address(FIRST_CLUSTER_IP, number)),
    )?;
    let seconds = node.status()?["startup"]["write"].as_f64();
    let daemon = node.daemon_pid().context("the daemon doesn't run")?;
    let sample = Sample {
        total,
        write: Duration::from_secs_f64(seconds.context("the status has no `startup.write`")?),
        peak: process_usage::peak_memory(daemon)?,
        changes: probe::measure_changes(&node, options.changes)?,
    };
    probe::stop_and_clean_up(&node)?;
    Ok(sample)
}

/// Measures how long it takes to load rules into a separate network namespace and to change them.
fn measure_rules(options: &Options, services: u32) -> Result<Sample> {
    let network = NodeNetwork::new()?;
    let sandbox = network.create_unconnected("rules")?;
    let loader = nft::loader(&sandbox);
    let endpoint = |number| SocketAddr::new(nth_address(ENDPOINTS, number), PORT);
    let service_set = ServiceSet {
        services,
        port: PORT,
        endpoints: (0..ENDPOINTS_PER_SERVICE).map(endpoint).collect(),
    };
    let directory = network.lab().directory();
    let mut sample = Sample {
        total: loader.load(directory, "full-sync.nft", &nft::full_sync(&service_set))?,
        ..Sample::default()
    };
    let number = services / 2;
    let (mut endpoints, mut stale) = (service_set.endpoints, Vec::new());
    for change in 0..(options.changes / RULE_CHANGE_DIVISOR).max(1) {
        let removed =
            std::mem::replace(&mut endpoints[0], endpoint(ENDPOINTS_PER_SERVICE + change));
        let text = nft::partial_sync(number, &endpoints, &[removed], &stale);
        let (delay, cpu_time) = (
            loader.load(directory, "partial-sync.nft", &text)?,
            Duration::ZERO,
        );
        sample.changes.push(Change { delay, cpu_time });
        stale = vec![removed];
    }
    Ok(sample)
}

fn endpoints(number: u32) -> impl Iterator<Item = IpAddr> {
    (0..ENDPOINTS_PER_SERVICE)
        .map(move |index| nth_address(ENDPOINTS, number * ENDPOINTS_PER_SERVICE + index))
}

fn yaml_files(count: u32) -> Vec<Manifest> {
    service_files(count, Protocol::UDP, [PORT; 2], endpoints)
}

/// Converts the YAML files to JSON lists, as `kubectl get -o json` prints them.
fn json_files(count: u32) -> Result<Vec<Manifest>> {
    let file = |yaml: Manifest| {
        let documents = yaml.text.split("---\n").skip(1);
        let items = documents.map(serde_saphyr::from_str::<Value>);
        let items = items.collect::<Result<Vec<_>, _>>()?;
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        Ok(Manifest {
            file: yaml.file.replace(".yaml", ".json"),
            text: serde_json::to_string_pretty(&list)?,
        })
    };
    yaml_files(count).into_iter().map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_in_json_holds_every_service_with_its_slice() {
        let json = json_files(3).unwrap();
        let list: Value = serde_json::from_str(&json[0].text).unwrap();

        assert_eq!(json[0].file, "services-0.json");
        let kinds = list["items"].as_array().unwrap().iter();
        let kinds: Vec<_> = kinds.map(|item| item["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["Service", "EndpointSlice"].repeat(3));
    }

    #[test]
    fn no_two_services_share_an_endpoint() {
        let last = endpoints(6).last().unwrap();

        assert!(endpoints(7).all(|address| address > last));
    }
}
