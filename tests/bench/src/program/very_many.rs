//! The large case: starts of a daemon with many Services, in JSON or YAML, compared with loading nftables
//! rules like kube-proxy's for fewer Services.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tunnel_common::table::Sizes;
use tunnel_tests::{
    clock,
    instance::Settings,
    load::race::offset,
    manifest::{Manifest, Protocol},
    topology::Topology,
    usage,
};

use super::{
    Options,
    probe::{self, Change, PORT},
};
use crate::{
    report::rounds,
    rules::{Shape, nft},
    services::{FIRST, many},
};

/// The first address of the endpoints. No two endpoints have the same address.
const ENDPOINTS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 128, 0, 0));

/// The number of endpoints per Service.
pub(super) const OF_EACH: u32 = 4;

/// The number of Services that are probed, evenly spaced. Programs are attached after the last write, so even
/// one translated Service proves that all are written.
const ASKED: u32 = 200;

/// The pause after a variant with rules: the kernel frees them in the background, which must not slow
/// down the next variant.
const SETTLING: Duration = Duration::from_secs(3);

/// The factor by which rules are changed less often than files, since each change of rules takes long.
const SELDOM: u32 = 5;

/// A variant of the large case: the form in which the Services are given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    Json,
    Yaml,
    /// `nft -f`, with this many Services.
    Rules(u32),
}

/// The measurements of a variant in one round.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// The time from the start until all Services are translated, or all rules loaded.
    pub(super) whole: Duration,
    /// The part of `whole` from parsed objects to complete maps.
    pub(super) write: Duration,
    /// The daemon's peak resident memory, in bytes.
    pub(super) peak: u64,
    pub(super) changes: Vec<Change>,
}

/// Measures each variant once a round, in a shuffled order; samples are in the order of the variants.
pub(super) fn measure(options: &Options, ways: &[Way]) -> Result<Vec<Vec<Sample>>> {
    rounds(options.starts, ways, |way| match *way {
        Way::Json => from_files(options, json_files(options.many)?),
        Way::Yaml => from_files(options, yaml_files(options.many)),
        Way::Rules(services) => {
            let sample = by_rules(options, services)
                .with_context(|| format!("nft, with {services} Services"))?;
            clock::pause(SETTLING);
            Ok(sample)
        }
    })
}

/// Measures a start of a daemon with these files, and changes after it.
fn from_files(options: &Options, files: Vec<Manifest>) -> Result<Sample> {
    let room = options.many.saturating_mul(2);
    let settings = Settings {
        maps: Sizes {
            frontends: room,
            slots: room.saturating_mul(OF_EACH),
            backends: room.saturating_mul(OF_EACH),
            ..Sizes::default()
        },
        ..options.common.settings()?
    };
    let node = probe::node(settings)?;
    for file in files {
        node.apply(file)?;
    }
    let apart = usize::try_from((options.many / ASKED).max(1))?;
    let last = options.many.saturating_sub(1);
    let asked = (0..options.many).step_by(apart).chain([last]);
    let whole = probe::begin(&node, asked.map(|number| offset(FIRST, number)))?;
    let seconds = node.status()?["startup"]["write"].as_f64();
    let daemon = node.daemon_pid().context("the daemon doesn't run")?;
    let sample = Sample {
        whole,
        write: Duration::from_secs_f64(seconds.context("the status has no `startup.write`")?),
        peak: usage::peak(daemon)?,
        changes: probe::change(&node, options.changes)?,
    };
    probe::end(&node)?;
    Ok(sample)
}

/// Measures the loading of rules into a separate network namespace, and changes of them.
fn by_rules(options: &Options, services: u32) -> Result<Sample> {
    let topology = Topology::new()?;
    let place = topology.elsewhere("rules")?;
    let loader = nft::loader(&place);
    let endpoint = |number| SocketAddr::new(offset(ENDPOINTS, number), PORT);
    let shape = Shape {
        services,
        port: PORT,
        endpoints: (0..OF_EACH).map(endpoint).collect(),
    };
    let folder = topology.lab().folder();
    let mut sample = Sample {
        whole: loader.load(folder, "whole.nft", &nft::whole(&shape))?,
        ..Sample::default()
    };
    let number = services / 2;
    let (mut endpoints, mut stale) = (shape.endpoints, Vec::new());
    for change in 0..(options.changes / SELDOM).max(1) {
        let gone = std::mem::replace(&mut endpoints[0], endpoint(OF_EACH + change));
        let text = nft::change(number, &endpoints, &[gone], &stale);
        let (reached, work) = (loader.load(folder, "change.nft", &text)?, Duration::ZERO);
        sample.changes.push(Change { reached, work });
        stale = vec![gone];
    }
    Ok(sample)
}

fn endpoints(number: u32) -> impl Iterator<Item = IpAddr> {
    (0..OF_EACH).map(move |place| offset(ENDPOINTS, number * OF_EACH + place))
}

fn yaml_files(count: u32) -> Vec<Manifest> {
    many(count, Protocol::UDP, [PORT; 2], endpoints)
}

/// Converts the YAML files into lists in JSON, as `kubectl get -o json` prints them.
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
