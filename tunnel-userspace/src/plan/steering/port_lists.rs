//! The ports that are steered: the kubelet's ports, and those in yurt-tunnel's ConfigMap (OpenYurt v1.7.0
//! `pkg/yurttunnel/util/util.go`, `trafficforward/iptables`).

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::reason::Reason;

use super::SteeringProblem;
use crate::model::ConfigMap;

/// The kubelet's ports, which are always steered.
const KUBELET_PORTS: [u16; 2] = [10_250, 10_255];
/// The maximum number of ports that the ConfigMap can add.
const MAX_PORTS: usize = 128;
/// The only valid destination port in `dnat-ports-pair`: yurt-tunnel-server's plain HTTP port.
const HTTP_LISTENER_PORT: u16 = 10_264;

const DNAT_KEY: &str = "dnat-ports-pair";
const HTTP_KEY: &str = "http-proxy-ports";
const HTTPS_KEY: &str = "https-proxy-ports";
const LOCALHOST_KEY: &str = "localhost-proxy-ports";

/// Returns the steered ports. The value is true if the agent must dial the port on the loopback address.
/// Leaves out invalid entries in the ConfigMap, and adds a problem for each.
pub(super) fn read_ports(
    config_map: Option<&ConfigMap>,
    problems: &mut BTreeSet<SteeringProblem>,
) -> BTreeMap<u16, bool> {
    let mut ports: BTreeMap<u16, bool> = KUBELET_PORTS.map(|port| (port, false)).into();
    let Some(config_map) = config_map else {
        return ports;
    };
    let mut lists = PortLists {
        config_map,
        problems,
    };
    let http = lists.parse_list(HTTP_KEY, parse_port);
    let https = lists.parse_list(HTTPS_KEY, parse_port);
    let dnat = lists.parse_list(DNAT_KEY, parse_pair);
    for duplicate in http.intersection(&https) {
        lists.add_problem(
            HTTP_KEY,
            format!("{duplicate} is in {HTTPS_KEY}, too, which takes precedence"),
        );
    }
    for port in http.iter().chain(&https).chain(&dnat) {
        ports.entry(*port).or_insert(false);
    }
    for port in lists.parse_list(LOCALHOST_KEY, parse_port) {
        ports.insert(port, true);
    }
    // The limit doesn't apply to the kubelet's ports, so that a long list can't displace them.
    let excess: Vec<u16> = ports
        .keys()
        .copied()
        .filter(|port| !KUBELET_PORTS.contains(port))
        .skip(MAX_PORTS)
        .collect();
    if let Some(first) = excess.first() {
        let count = excess.len();
        lists.add_problem(
            "…",
            format!(
                "{count} ports, from {first} on, are not steered: at most {MAX_PORTS} ports are"
            ),
        );
    }
    for port in excess {
        ports.remove(&port);
    }
    ports
}

/// A parser for the port lists in the ConfigMap.
struct PortLists<'a> {
    config_map: &'a ConfigMap,
    problems: &'a mut BTreeSet<SteeringProblem>,
}

impl PortLists<'_> {
    fn parse_list(&mut self, key: &str, read: fn(&str) -> Result<u16, String>) -> BTreeSet<u16> {
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
                Err(text) => self.add_problem(key, text),
            }
        }
        ports
    }

    fn add_problem(&mut self, key: &str, text: String) {
        let name = &self.config_map.name;
        self.problems.insert(SteeringProblem {
            reason: Reason::PortsRejected,
            node: None,
            object: format!("ConfigMap {name}: data[{key}]"),
            text,
        });
    }
}

fn parse_port(entry: &str) -> Result<u16, String> {
    match entry.parse() {
        Ok(port) if port != 0 && entry.bytes().all(|byte| byte.is_ascii_digit()) => Ok(port),
        _ => Err(format!("`{entry}` is not a port from 1 to 65535")),
    }
}

fn parse_pair(entry: &str) -> Result<u16, String> {
    let Some((from, to)) = entry.split_once('=') else {
        return Err(format!(
            "`{entry}` is not a pair of ports, for example 9100={HTTP_LISTENER_PORT}"
        ));
    };
    let (from, to) = (parse_port(from.trim())?, parse_port(to.trim())?);
    if to == HTTP_LISTENER_PORT {
        Ok(from)
    } else {
        Err(format!(
            "`{entry}` does not end with {HTTP_LISTENER_PORT}, the only supported destination port"
        ))
    }
}
