//! The ports that are steered: those of kubelets, and those in the ConfigMap of yurt-tunnel (OpenYurt v1.7.0
//! `pkg/yurttunnel/util/util.go`, `trafficforward/iptables`).

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::reason::Reason;

use super::SteeringProblem;
use crate::model::ConfigMap;

/// The ports of the kubelet, which are always steered.
const KUBELET: [u16; 2] = [10_250, 10_255];
/// The maximum number of ports in the ConfigMap.
const MOST: usize = 128;
/// The only valid destination in `dnat-ports-pair`: the plain HTTP port of yurt-tunnel-server.
const HTTP_LISTENER: u16 = 10_264;

const DNAT: &str = "dnat-ports-pair";
const HTTP: &str = "http-proxy-ports";
const HTTPS: &str = "https-proxy-ports";
const LOCALHOST: &str = "localhost-proxy-ports";

/// Returns the steered ports, each with true if the agent must dial its loopback address. Invalid entries of
/// the ConfigMap are left out, and added to the problems.
pub(super) fn read(
    config_map: Option<&ConfigMap>,
    problems: &mut BTreeSet<SteeringProblem>,
) -> BTreeMap<u16, bool> {
    let mut ports: BTreeMap<u16, bool> = KUBELET.map(|port| (port, false)).into();
    let Some(config_map) = config_map else {
        return ports;
    };
    let mut lists = Lists {
        config_map,
        problems,
    };
    let http = lists.of(HTTP, port);
    let https = lists.of(HTTPS, port);
    let dnat = lists.of(DNAT, pair);
    for both in http.intersection(&https) {
        lists.note(
            HTTP,
            format!("{both} is in {HTTPS}, too, which takes precedence"),
        );
    }
    for port in http.iter().chain(&https).chain(&dnat) {
        ports.entry(*port).or_insert(false);
    }
    for port in lists.of(LOCALHOST, port) {
        ports.insert(port, true);
    }
    // The limit doesn't apply to the kubelet's ports, so that a long list can't remove them.
    let beyond: Vec<u16> = ports
        .keys()
        .copied()
        .filter(|port| !KUBELET.contains(port))
        .skip(MOST)
        .collect();
    if let Some(first) = beyond.first() {
        let count = beyond.len();
        lists.note(
            "…",
            format!("{count} ports, from {first} on, are not steered: at most {MOST} ports are"),
        );
    }
    for port in beyond {
        ports.remove(&port);
    }
    ports
}

/// Parses the port lists of the ConfigMap.
struct Lists<'a> {
    config_map: &'a ConfigMap,
    problems: &'a mut BTreeSet<SteeringProblem>,
}

impl Lists<'_> {
    fn of(&mut self, key: &str, read: fn(&str) -> Result<u16, String>) -> BTreeSet<u16> {
        let list = self.config_map.data.get(key).map_or("", String::as_str);
        let mut ports = BTreeSet::new();
        for entry in list
            .split(',')
            .map(str::trim)
            .filter(|entry| !entry.is_empty())
        {
            match read(entry) {
                Ok(port) => {
                    ports.insert(port);
                }
                Err(text) => self.note(key, text),
            }
        }
        ports
    }

    fn note(&mut self, key: &str, text: String) {
        let name = &self.config_map.name;
        self.problems.insert(SteeringProblem {
            reason: Reason::PortsRejected,
            node: None,
            object: format!("ConfigMap {name}: data[{key}]"),
            text,
        });
    }
}

fn port(entry: &str) -> Result<u16, String> {
    match entry.parse() {
        Ok(port) if port != 0 && entry.bytes().all(|byte| byte.is_ascii_digit()) => Ok(port),
        _ => Err(format!("`{entry}` is not a port from 1 to 65535")),
    }
}

fn pair(entry: &str) -> Result<u16, String> {
    let Some((from, to)) = entry.split_once('=') else {
        return Err(format!(
            "`{entry}` is not a pair of ports, for example 9100={HTTP_LISTENER}"
        ));
    };
    let (from, to) = (port(from.trim())?, port(to.trim())?);
    if to == HTTP_LISTENER {
        Ok(from)
    } else {
        Err(format!(
            "`{entry}` does not end with {HTTP_LISTENER}, the only supported destination port"
        ))
    }
}
