//! Raises the limit on open files at startup, and checks that it suffices for the config.

use tracing::warn;

use crate::{config::Config, file_descriptors, tunnel::ingress};

/// Raises the soft limit on open files to the hard limit, and returns the resulting limit.
pub(super) fn raise() -> u64 {
    match file_descriptors::raise_limit() {
        Ok(limit) => limit,
        Err(error) => {
            warn!(%error, "cannot raise the limit on open files");
            file_descriptors::limit()
        }
    }
}

/// Raises the limit on open files. Logs and returns a warning if the config allows more connections than the limit.
pub(super) fn raise_and_check(config: &Config) -> Option<String> {
    let problem = problem(config, raise());
    if let Some(problem) = &problem {
        warn!(problem, "the limit on open files is too low for the config");
    }
    problem
}

/// Returns a warning if the config allows more connections than a limit on open files.
fn problem(config: &Config, limit: u64) -> Option<String> {
    let allowed = allowed_connections(config);
    let sum = allowed
        .iter()
        .fold(0_u64, |sum, (count, _)| sum.saturating_add(*count));
    let reserved = file_descriptors::reserved(limit);
    if sum <= limit - reserved {
        return None;
    }
    let parts: Vec<_> = allowed
        .iter()
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    let needed = sum.saturating_add(file_descriptors::RESERVED);
    Some(format!(
        "the process may open {limit} files, {reserved} of them for its own purposes, but the config allows {sum} \
         connections: {}. Connections beyond the limit are refused (descriptor_limit). Raise the limit \
         (LimitNOFILE in systemd) to {needed}, or lower the numbers in the config",
        parts.join(" + ")
    ))
}

/// Returns the maximum numbers of connections of others, each with the origin of the number.
fn allowed_connections(config: &Config) -> Vec<(u64, &'static str)> {
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let tunnel = &config.tunnel;
    let mut allowed = Vec::new();
    if tunnel.steering.is_some() {
        allowed.push((count(ingress::MAX_CLIENTS), "clients of the ingress"));
    }
    if let Some(gateway) = &tunnel.gateway {
        let handshakes = count(gateway.max_pending_handshakes);
        allowed.push((
            count(gateway.max_sessions),
            "sessions (tunnel.gateway.maxSessions)",
        ));
        allowed.push((
            handshakes,
            "handshakes (tunnel.gateway.maxPendingHandshakes)",
        ));
    }
    if let Some(agent) = &tunnel.agent {
        let sessions =
            count(agent.gateways.len()).saturating_mul(agent.connections_per_gateway.into());
        allowed.push((
            sessions.saturating_mul(tunnel.session.max_streams.into()),
            "streams (tunnel.session.maxStreams for each of tunnel.agent.connectionsPerGateway to each of \
             tunnel.agent.gateways)",
        ));
    }
    allowed
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: &str = "identity: { files: { ca: a, cert: b, key: c } }";

    fn config(sections: &str) -> Config {
        Config::parse(&format!("tunnel: {{ {sections}, {IDENTITY} }}")).expect("good")
    }

    #[test]
    fn a_config_that_allows_more_connections_than_files_is_reported_with_its_keys() {
        let node = config("steering: {}, gateway: { maxSessions: 100, maxPendingHandshakes: 50 }");
        let text = problem(&node, 1024).expect("too low");
        for part in [
            "may open 1024 files, 512 of them",
            "allows 16534 connections",
            "16384 clients of the ingress",
            "100 sessions (tunnel.gateway.maxSessions)",
            "50 handshakes (tunnel.gateway.maxPendingHandshakes)",
            "to 17046,",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(problem(&node, 17_046), None);
        assert!(problem(&node, 17_045).is_some());

        let agent = config("agent: { gateways: [\"a:1\", \"b:1\"] }");
        let text = problem(&agent, 1024).expect("too low");
        assert!(
            text.contains("1000 streams (tunnel.session.maxStreams"),
            "{text}"
        );
        assert_eq!(problem(&agent, 4096), None);
        assert_eq!(problem(&Config::default(), 256), None, "no connections");
    }
}
