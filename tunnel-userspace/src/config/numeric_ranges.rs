//! Checks the numbers, durations and list items in the config.

use std::{fmt::Display, ops::RangeInclusive, time::Duration};

use super::{Config, FieldError, TunnelConfig};
use crate::{controller::ControllerSettings, duration::DisplayDuration};

/// The largest capacity that a map may have, in entries.
pub(super) const MAX_ENTRIES: u32 = 1 << 24;

/// Returns an error if a number or duration is out of range.
pub(super) fn check(config: &Config) -> Result<(), FieldError> {
    const SECOND: DisplayDuration = DisplayDuration(Duration::from_secs(1));
    let seconds = |least, most| {
        DisplayDuration(Duration::from_secs(least))..=DisplayDuration(Duration::from_secs(most))
    };

    for (size, entries) in config.bpf.maps.by_key() {
        within(&format!("bpf.maps.{size}"), entries, 1..=MAX_ENTRIES)?;
    }
    within(
        "bpf.checkInterval",
        DisplayDuration(config.bpf.check_interval),
        DisplayDuration(Duration::from_millis(100))..=DisplayDuration(Duration::from_secs(60)),
    )?;
    within(
        "bpf.testConnectionInterval",
        DisplayDuration(config.bpf.test_connection_interval),
        DisplayDuration(Duration::from_millis(100))..=DisplayDuration(Duration::from_hours(24)),
    )?;
    let service = &config.service;
    at_least(
        "service.fullSyncInterval",
        DisplayDuration(service.full_sync_interval),
        SECOND,
    )?;
    within("service.namespaceShare", service.namespace_share, 1..=100)?;
    let poll_interval = DisplayDuration(service.local_listener_poll_interval);
    within(
        "service.localListenerPollInterval",
        poll_interval,
        seconds(1, 60),
    )?;
    if let Some(file) = &config.source.file {
        let delay = DisplayDuration(file.replacement_delay);
        within("source.file.replacementDelay", delay, seconds(0, 300))?;
        at_least("source.file.maxFileBytes", file.max_file_bytes, 1)?;
        at_least("source.file.maxDocuments", file.max_documents, 1)?;
    }
    if let Some(kube) = &config.source.kube {
        for (name, value, bounds) in [
            ("connectTimeout", kube.connect_timeout, seconds(1, 60)),
            ("watchTimeout", kube.watch_timeout, seconds(10, 290)),
            ("maxBackoff", kube.max_backoff, seconds(1, 300)),
            (
                "snapshotInterval",
                kube.snapshot_interval,
                seconds(1, 86_400),
            ),
            (
                "initialSyncTimeout",
                kube.initial_sync_timeout,
                seconds(0, 3600),
            ),
            ("events.interval", kube.events.interval, seconds(1, 3600)),
        ] {
            within(
                &format!("source.kube.{name}"),
                DisplayDuration(value),
                bounds,
            )?;
        }
        within("source.kube.events.burst", kube.events.burst, 1..=1000)?;
        within("source.kube.pageSize", kube.page_size, 10..=10_000)?;
    }
    check_controller(&config.controller)?;
    check_tunnel(&config.tunnel)
}

fn check_controller(config: &ControllerSettings) -> Result<(), FieldError> {
    const DAY: Duration = Duration::from_secs(86_400);
    let days = |least: u32, most: u32| DisplayDuration(DAY * least)..=DisplayDuration(DAY * most);
    let ca_life = DisplayDuration(config.ca_life);
    within("controller.caLife", ca_life, days(1, 36_500))?;
    // A third of the life must suffice for the change to the next CA.
    let overlap = DisplayDuration(Duration::ZERO)..=DisplayDuration(config.ca_life / 6);
    within(
        "controller.overlap",
        DisplayDuration(config.overlap),
        overlap,
    )?;
    let life = DisplayDuration(Duration::from_secs(10))..=DisplayDuration(config.ca_life / 6);
    within("controller.life", DisplayDuration(config.life), life)?;
    let pace = config.requests_per_second;
    within("controller.requestsPerSecond", pace, 1..=1000)
}

fn check_tunnel(config: &TunnelConfig) -> Result<(), FieldError> {
    const MILLISECOND: DisplayDuration = DisplayDuration(Duration::from_millis(1));

    let request = config.identity.as_ref();
    if let Some(request) = request.and_then(|identity| identity.request.as_ref())
        && !request.life.is_zero()
    {
        let lives = Duration::from_secs(600)..=Duration::from_secs(36_500 * 86_400);
        let lives = DisplayDuration(*lives.start())..=DisplayDuration(*lives.end());
        within(
            "tunnel.identity.request.life",
            DisplayDuration(request.life),
            lives,
        )?;
    }
    if let Some(steering) = &config.steering {
        within(
            "tunnel.steering.ingressPort",
            steering.ingress_port,
            1..=u16::MAX,
        )?;
        // The kernel itself uses 0 to 4 (include/uapi/linux/rtnetlink.h).
        let protocol = steering.route_protocol;
        within("tunnel.steering.routeProtocol", protocol, 5..=u8::MAX)?;
    }
    if let Some(gateway) = &config.gateway {
        at_least("tunnel.gateway.maxSessions", gateway.max_sessions, 1)?;
        at_least(
            "tunnel.gateway.maxPendingHandshakes",
            gateway.max_pending_handshakes,
            1,
        )?;
        let timeout = DisplayDuration(gateway.handshake_timeout);
        at_least("tunnel.gateway.handshakeTimeout", timeout, MILLISECOND)?;
        let timeout = DisplayDuration(gateway.missing_node_timeout);
        let hour = DisplayDuration(Duration::from_secs(3600));
        let bounds = DisplayDuration(Duration::ZERO)..=hour;
        within("tunnel.gateway.missingNodeTimeout", timeout, bounds)?;
    }
    if let Some(agent) = &config.agent {
        within(
            "tunnel.agent.connectionsPerGateway",
            agent.connections_per_gateway,
            1..=4,
        )?;
        at_least("tunnel.agent.maxPendingDials", agent.max_pending_dials, 1)?;
        let timeout = DisplayDuration(agent.dial_timeout);
        at_least("tunnel.agent.dialTimeout", timeout, MILLISECOND)?;
    }
    let session = &config.session;
    within("tunnel.session.maxStreams", session.max_streams, 1..=10_000)?;
    within("tunnel.session.maxThreads", session.max_threads, 1..=64)?;
    at_least(
        "tunnel.session.streamWindowBytes",
        session.stream_window_bytes,
        65_535,
    )?;
    at_least(
        "tunnel.session.maxBufferedBytes",
        session.max_buffered_bytes,
        1 << 20,
    )?;
    let [interval, timeout] = [session.ping_interval, session.ping_timeout].map(DisplayDuration);
    at_least("tunnel.session.pingInterval", interval, MILLISECOND)?;
    at_least("tunnel.session.pingTimeout", timeout, MILLISECOND)?;
    if session.idle_timeout.is_zero() {
        return Ok(());
    }
    let bounds = Duration::from_secs(1)..=Duration::from_secs(7 * 86_400);
    let (least, most) = bounds.into_inner();
    within(
        "tunnel.session.idleTimeout",
        DisplayDuration(session.idle_timeout),
        DisplayDuration(least)..=DisplayDuration(most),
    )
}

/// Returns an error if a value is outside its bounds, which are inclusive.
fn within<T: Display + PartialOrd>(
    field: &str,
    value: T,
    bounds: RangeInclusive<T>,
) -> Result<(), FieldError> {
    if bounds.contains(&value) {
        return Ok(());
    }
    let (least, most) = bounds.into_inner();
    let reason = format!("must be from {least} to {most}, but is {value}");
    Err((field.to_owned(), reason))
}

/// Returns an error if a value is less than its minimum.
fn at_least<T: Display + PartialOrd>(field: &str, value: T, least: T) -> Result<(), FieldError> {
    if value >= least {
        return Ok(());
    }
    let reason = format!("must be at least {least}, but is {value}");
    Err((field.to_owned(), reason))
}

/// Returns an error for the first list item that `is_valid` rejects.
pub(super) fn check_each(
    field: &str,
    texts: &[String],
    is_valid: impl Fn(&str) -> bool,
    reason: &str,
) -> Result<(), FieldError> {
    let mut texts = texts.iter().enumerate();
    match texts.find(|(_, text)| !is_valid(text)) {
        Some((index, text)) => Err((format!("{field}[{index}]"), format!("`{text}` {reason}"))),
        None => Ok(()),
    }
}
