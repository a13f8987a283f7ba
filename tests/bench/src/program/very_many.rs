//! Very many Services: a daemon that starts with them, from JSON and from YAML, beside the loading
//! of rules of kube-proxy's shape for fewer.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tunnel_common::table::Sizes;
use tunnel_tests::{
    clock::{self, Instant},
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
    report::shuffled,
    rules::{self, Shape, nft},
    services::{FIRST, chunks, many},
};

/// The first address of the endpoints, which are all different.
const ENDPOINTS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 128, 0, 0));

/// How many endpoints each Service has.
pub(super) const OF_EACH: u32 = 4;

/// How many Services are asked, spread over all. Programs are attached once everything is written,
/// so one that is translated tells of all.
const ASKED: u32 = 200;

/// The kernel takes rules apart in the background, which is not to be counted to what comes next.
const SETTLING: Duration = Duration::from_secs(3);

/// Rules are changed this much more seldom than files: a change of many of them takes long.
const SELDOM: u32 = 5;

/// What is written, and by whom.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    Json,
    Yaml,
    /// `nft -f`, with so many Services.
    Rules(u32),
}

/// What one round measured of a way.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// From nothing to everything.
    pub(super) whole: Duration,
    /// Of that, from objects that are read to maps that hold them.
    pub(super) write: Duration,
    /// The most memory that the daemon had resident, in bytes.
    pub(super) peak: u64,
    pub(super) changes: Vec<Change>,
}

/// Measures each way once a round, in a shuffled order; samples are in the order of the ways.
pub(super) fn measure(options: &Options, ways: &[Way]) -> Result<Vec<Vec<Sample>>> {
    let mut rounds = Vec::new();
    for _ in 0..options.starts {
        let mut samples = vec![Sample::default(); ways.len()];
        for at in shuffled(ways.len()) {
            samples[at] = match ways[at] {
                Way::Json => from_files(options, json_files(options.many)?)?,
                Way::Yaml => from_files(options, yaml_files(options.many))?,
                Way::Rules(services) => by_rules(options, services)
                    .with_context(|| format!("nft, with {services} Services"))?,
            };
            if let Way::Rules(_) = ways[at] {
                clock::pause(SETTLING);
            }
        }
        rounds.push(samples);
    }
    Ok(rounds)
}

/// A daemon that starts with these files.
fn from_files(options: &Options, files: Vec<Manifest>) -> Result<Sample> {
    let room = options.many.saturating_mul(2);
    let settings = Settings {
        maps: Sizes {
            fronts: room,
            slots: room.saturating_mul(OF_EACH),
            backends: room.saturating_mul(OF_EACH),
            ..Sizes::default()
        },
        ..options.common.settings()?
    };
    let node = probe::node(settings)?;
    let client = node.pod("client")?;
    for file in files {
        node.apply(file)?;
    }
    let start = Instant::now();
    node.launch()?;
    let apart = (options.many / ASKED).max(1);
    let last = options.many.saturating_sub(1);
    let asked = (0..options.many)
        .step_by(usize::try_from(apart)?)
        .chain([last]);
    probe::until_all(&client, asked.map(|number| offset(FIRST, number)))?;
    let whole = start.elapsed();
    node.wait_ready()?;
    let seconds = node.status()?["start"]["write"].as_f64();
    let daemon = node.daemon_pid().context("the daemon doesn't run")?;
    let sample = Sample {
        whole,
        write: Duration::from_secs_f64(seconds.context("no time of writing")?),
        peak: usage::peak(daemon)?,
        changes: probe::change(&node, options.changes)?,
    };
    probe::end(&node)?;
    Ok(sample)
}

/// Rules that are loaded into a network namespace of their own.
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
    let file = rules::write(folder, "whole.nft", &nft::whole(&shape))?;
    let mut sample = Sample {
        whole: loader.load(&file)?,
        ..Sample::default()
    };
    let number = services / 2;
    let (mut endpoints, mut stale) = (shape.endpoints, Vec::new());
    for change in 0..(options.changes / SELDOM).max(1) {
        let gone = std::mem::replace(&mut endpoints[0], endpoint(OF_EACH + change));
        let text = nft::change(number, &endpoints, &[gone], &stale);
        let file = rules::write(folder, "change.nft", &text)?;
        let took = loader.load(&file)?;
        sample.changes.push(Change {
            reached: took,
            work: took,
        });
        stale = vec![gone];
    }
    Ok(sample)
}

fn endpoints(number: u32) -> impl Iterator<Item = IpAddr> {
    (0..OF_EACH).map(move |place| offset(ENDPOINTS, number * OF_EACH + place))
}

fn yaml_files(count: u32) -> Vec<Manifest> {
    many(count, Protocol::Udp, [PORT; 2], endpoints)
}

/// The same objects in lists, as `kubectl get -o json` prints them.
fn json_files(count: u32) -> Result<Vec<Manifest>> {
    let file = |(first, last): (u32, u32)| {
        let items: Vec<_> = (first..last).flat_map(objects).collect();
        let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
        Ok(Manifest {
            file: format!("services-{first}.json"),
            text: serde_json::to_string_pretty(&list)?,
        })
    };
    chunks(count).map(file).collect()
}

fn objects(number: u32) -> [Value; 2] {
    let (name, address) = (format!("svc-{number}"), offset(FIRST, number));
    let port = format!("udp-{PORT}");
    let endpoints: Vec<_> = endpoints(number)
        .map(|address| {
            let conditions = json!({"ready": true, "serving": true, "terminating": false});
            json!({"addresses": [address], "conditions": conditions})
        })
        .collect();
    [
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "type": "ClusterIP",
                "clusterIP": address,
                "clusterIPs": [address],
                "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack",
                "ports": [{"name": port, "protocol": "UDP", "port": PORT, "targetPort": PORT}],
            },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{name}-ipv4"),
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "ports": [{"name": port, "port": PORT, "protocol": "UDP"}],
            "endpoints": endpoints,
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_and_yaml_say_the_same() {
        let (json, yaml) = (json_files(3).unwrap(), yaml_files(3));
        let list: Value = serde_json::from_str(&json[0].text).unwrap();
        let documents = yaml[0].text.split("---\n").skip(1);
        let documents: Vec<Value> = documents
            .map(|text| serde_saphyr::from_str(text).unwrap())
            .collect();

        let items = list["items"].as_array().unwrap();
        assert_eq!(items.len(), 6);
        for (one, other) in items.iter().zip(&documents) {
            assert_eq!(one["metadata"]["name"], other["metadata"]["name"]);
            assert_eq!(one["spec"], other["spec"]);
            assert_eq!(one["endpoints"], other["endpoints"]);
        }
    }

    #[test]
    fn no_two_services_share_an_endpoint() {
        let last = endpoints(6).last().unwrap();

        assert!(endpoints(7).all(|address| address > last));
    }
}
