//! The section `conntrack`: the kernel's settings of connection tracking that `culvert prepare` writes, as kube-proxy does
//! (`cmd/kube-proxy/app/conntrack.go`).

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::FieldError;
use crate::duration;

/// The kernel's settings of connection tracking. 0 and false leave a setting as it is.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct ConntrackConfig {
    /// The maximum number of connections, `nf_conntrack_max`.
    pub max: u32,
    /// The timeout of open TCP connections.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_established_timeout: Duration,
    /// The timeout of TCP connections that one end has closed.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tcp_close_wait_timeout: Duration,
    /// True if packets outside the TCP window count as valid.
    pub tcp_be_liberal: bool,
    /// The timeout of UDP without an answer.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub udp_timeout: Duration,
    /// The timeout of UDP with packets in both directions.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub udp_stream_timeout: Duration,
}

impl ConntrackConfig {
    fn timeouts(&self) -> [(&'static str, &'static str, Duration); 4] {
        [
            (
                "tcpEstablishedTimeout",
                "nf_conntrack_tcp_timeout_established",
                self.tcp_established_timeout,
            ),
            (
                "tcpCloseWaitTimeout",
                "nf_conntrack_tcp_timeout_close_wait",
                self.tcp_close_wait_timeout,
            ),
            ("udpTimeout", "nf_conntrack_udp_timeout", self.udp_timeout),
            (
                "udpStreamTimeout",
                "nf_conntrack_udp_timeout_stream",
                self.udp_stream_timeout,
            ),
        ]
    }

    /// Returns the names and values of the settings to write, in `net.netfilter`.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let max = ("nf_conntrack_max", u64::from(self.max));
        let is_liberal = (
            "nf_conntrack_tcp_be_liberal",
            u64::from(self.tcp_be_liberal),
        );
        let timeouts = self.timeouts();
        let timeouts = timeouts
            .into_iter()
            .map(|(_, name, timeout)| (name, timeout.as_secs()));
        let all = [max, is_liberal].into_iter().chain(timeouts);
        all.filter(|(_, value)| *value != 0)
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        for (field, _, timeout) in self.timeouts() {
            duration::check_seconds(timeout, Duration::ZERO)
                .map_err(|reason| (format!("conntrack.{field}"), reason))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_configured_is_written() {
        assert_eq!(ConntrackConfig::default().settings().count(), 0);
        let config = ConntrackConfig {
            max: 200_000,
            tcp_close_wait_timeout: Duration::from_secs(3600),
            tcp_be_liberal: true,
            ..ConntrackConfig::default()
        };
        let settings: Vec<_> = config.settings().collect();
        assert_eq!(
            settings,
            [
                ("nf_conntrack_max", 200_000),
                ("nf_conntrack_tcp_be_liberal", 1),
                ("nf_conntrack_tcp_timeout_close_wait", 3600),
            ]
        );
    }

    #[test]
    fn timeouts_are_whole_seconds() {
        let config = ConntrackConfig {
            udp_timeout: Duration::from_millis(1500),
            ..ConntrackConfig::default()
        };
        let (field, reason) = config.check().expect_err("not whole");
        assert_eq!(field, "conntrack.udpTimeout");
        assert!(reason.contains("1500ms"), "{reason}");
    }
}
