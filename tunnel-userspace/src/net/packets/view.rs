//! The state of the translation of packets, for the status, the metrics and the readiness.

use serde::{Deserialize, Serialize};

/// The links whose packets are translated, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PacketsView {
    /// True if packets are translated (`service.packets.enabled`).
    pub enabled: bool,
    /// True if at least one link has all programs.
    #[serde(skip)]
    pub has_programs: bool,
    /// The names of the uplinks.
    pub uplinks: Vec<String>,
    /// The names of the uplinks from which packets are sent on past the network stack.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub redirecting: Vec<String>,
    /// The names of the links that lead to pods, with `service.packets.links: all`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pod_links: Vec<String>,
    /// Descriptions of the programs of others on these links.
    pub others: Vec<String>,
    /// The links whose packets are not translated, a missing uplink, and the settings of the kernel that keep packets from
    /// backends.
    pub warnings: Vec<String>,
    /// The current problem, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl PacketsView {
    /// Returns a description of the problem if packets are translated on no link because of it.
    pub(crate) fn unavailable(&self) -> Option<String> {
        let problem = self.problem.as_ref()?;
        let is_unavailable = self.enabled && !self.has_programs;
        is_unavailable.then(|| format!("packets are not translated: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_makes_packets_unavailable_only_if_no_link_has_the_programs() {
        let problem = |enabled, has_programs| PacketsView {
            enabled,
            has_programs,
            uplinks: vec!["eth0".to_owned()],
            problem: Some("the kernel has no memory".to_owned()),
            ..PacketsView::default()
        };
        assert_eq!(
            problem(true, false).unavailable().as_deref(),
            Some("packets are not translated: the kernel has no memory")
        );
        assert_eq!(problem(true, true).unavailable(), None);
        assert_eq!(problem(false, false).unavailable(), None);
        assert_eq!(PacketsView::default().unavailable(), None);
    }
}
