//! The section `service.packets`.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::{flow::Timeouts, fragment::FragmentRecord};

use super::FieldError;
use crate::duration;

/// The lowest port that may stand for a client.
const FIRST_PORT: u16 = 1024;

/// The settings for packets that no socket hook of this node has translated, and for their replies.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct PacketsConfig {
    /// True if packets that arrive and are addressed to Services are translated.
    pub enabled: bool,
    /// The links on which packets are translated.
    pub links: LinkSelection,
    /// The way of packets from the link on which they arrive to the link of their receiver.
    pub delivery: Delivery,
    /// The uplinks to which `delivery` applies: names, or the beginnings of names, followed by `*`.
    pub delivery_uplinks: Vec<String>,
    /// The address of this node that stands for masqueraded clients.
    pub address: MasqueradeAddress,
    /// The ports that stand for masqueraded clients: `auto`, or the first and the last one, such as `1024-29999`.
    pub ports: String,
    /// The maximum number of refused packets that are answered each second by a reset or an ICMP error.
    pub refusals_per_second: u32,
    /// The times after which idle flows end, and the rest of a fragmented packet is no longer translated.
    pub timeouts: FlowTimeouts,
}

impl Default for PacketsConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            links: LinkSelection::default(),
            delivery: Delivery::default(),
            delivery_uplinks: vec!["*".to_owned()],
            address: MasqueradeAddress::default(),
            ports: AUTO.to_owned(),
            refusals_per_second: 1000,
            timeouts: FlowTimeouts::default(),
        }
    }
}

/// The value of `ports` for which the daemon chooses the ports.
const AUTO: &str = "auto";

/// The links on which packets are translated.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkSelection {
    /// The uplinks.
    #[default]
    Uplinks,
    /// The uplinks, and the links that lead to pods.
    All,
}

/// The way of packets to their receiver.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Delivery {
    /// Through the network stack: firewall rules and NetworkPolicies see the packets.
    #[default]
    Stack,
    /// Past the network stack, where a packet needs nothing else of it.
    Redirect,
}

/// The address of this node that stands for masqueraded clients.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MasqueradeAddress {
    /// The address of the link by which the packets leave.
    #[default]
    Link,
    /// The first `InternalIP` of each family in the Node object.
    Node,
}

/// The times after which idle flows end.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct FlowTimeouts {
    /// For a TCP connection that has been answered.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_established: Duration,
    /// For a TCP connection that one end has closed.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_half_closed: Duration,
    /// For a TCP connection that has not been answered.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_half_open: Duration,
    /// For a TCP connection that both ends have closed.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_closing: Duration,
    /// For a TCP connection that was reset.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_closed: Duration,
    /// For UDP without an answer.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub udp: Duration,
    /// For UDP with packets in both directions.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub udp_answered: Duration,
    /// For the fragments of a packet, after the first one.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub fragments: Duration,
}

impl Default for FlowTimeouts {
    fn default() -> Self {
        let Timeouts {
            closed,
            closing,
            half_open,
            unanswered,
            answered,
            half_closed,
            established,
        } = Timeouts::DEFAULT;
        let seconds = |number: u32| Duration::from_secs(number.into());
        Self {
            tcp_established: seconds(established),
            tcp_half_closed: seconds(half_closed),
            tcp_half_open: seconds(half_open),
            tcp_closing: seconds(closing),
            tcp_closed: seconds(closed),
            udp: seconds(unanswered),
            udp_answered: seconds(answered),
            fragments: seconds(FragmentRecord::DEFAULT_TIMEOUT),
        }
    }
}

impl FlowTimeouts {
    /// Returns the timeouts for the programs. They are at most 30 days.
    #[must_use]
    pub fn for_programs(&self) -> Timeouts {
        Timeouts {
            closed: seconds(self.tcp_closed),
            closing: seconds(self.tcp_closing),
            half_open: seconds(self.tcp_half_open),
            unanswered: seconds(self.udp),
            answered: seconds(self.udp_answered),
            half_closed: seconds(self.tcp_half_closed),
            established: seconds(self.tcp_established),
        }
    }

    /// Returns the timeout of fragments for the programs, in seconds.
    #[must_use]
    pub fn fragments_for_programs(&self) -> u32 {
        seconds(self.fragments)
    }

    fn by_key(&self) -> [(&'static str, Duration); 8] {
        [
            ("tcpEstablished", self.tcp_established),
            ("tcpHalfClosed", self.tcp_half_closed),
            ("tcpHalfOpen", self.tcp_half_open),
            ("tcpClosing", self.tcp_closing),
            ("tcpClosed", self.tcp_closed),
            ("udp", self.udp),
            ("udpAnswered", self.udp_answered),
            ("fragments", self.fragments),
        ]
    }
}

/// Returns a timeout in seconds.
fn seconds(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX)
}

impl PacketsConfig {
    /// Returns the configured ports that stand for clients, or `None` if the daemon chooses them.
    #[must_use]
    pub fn port_range(&self) -> Option<(u16, u16)> {
        parse_ports(&self.ports)
    }

    /// Returns the uplinks on which arriving packets are redirected, as in [`Self::delivery_uplinks`].
    #[must_use]
    pub fn redirecting_uplinks(&self) -> &[String] {
        match self.delivery {
            Delivery::Redirect if self.enabled => &self.delivery_uplinks,
            Delivery::Stack | Delivery::Redirect => &[],
        }
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        if self.ports != AUTO && self.port_range().is_none() {
            let reason = format!(
                "`{}` is neither `auto` nor a range from {FIRST_PORT} to {}, such as 1024-29999",
                self.ports,
                u16::MAX
            );
            return Err(("service.packets.ports".to_owned(), reason));
        }
        for (key, timeout) in self.timeouts.by_key() {
            duration::check_seconds(timeout, Duration::from_secs(1))
                .map_err(|reason| (format!("service.packets.timeouts.{key}"), reason))?;
        }
        Ok(())
    }
}

/// Parses a range of ports such as `1024-29999`.
fn parse_ports(text: &str) -> Option<(u16, u16)> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (FIRST_PORT <= first && first <= last).then_some((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_ports_has_a_first_and_a_last_port() {
        assert_eq!(parse_ports("1024-29999"), Some((1024, 29_999)));
        assert_eq!(parse_ports("61000 - 65535"), Some((61_000, 65_535)));
        for text in [
            "auto",
            "1023-2000",
            "3000-2000",
            "1024-65536",
            "1024",
            "-",
            "",
        ] {
            assert_eq!(parse_ports(text), None, "{text}");
        }
    }
}
