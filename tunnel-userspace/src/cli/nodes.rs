//! `culvert nodes`: shows the edge nodes and their sessions as a table, and ends the sessions of a node.

use clap::{Args, Subcommand};
use jiff::Timestamp;

use super::{ConfigArgs, QueryArgs, QueryError, parse, print, print_response, runtime, table};
use crate::{
    admin::{self, END_SESSIONS_PATH, EndedSessions},
    config::Config,
    tunnel::{NodeView, SessionView},
};

/// The arguments of `culvert nodes`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct NodesArgs {
    /// The node to show. If absent, all nodes are shown.
    name: Option<String>,
    #[command(flatten)]
    query: QueryArgs,
    #[command(subcommand)]
    command: Option<NodesCommand>,
}

/// The subcommands of `culvert nodes`.
#[derive(Debug, Subcommand)]
pub enum NodesCommand {
    /// End all sessions of a node with this node's gateway, and reset their streams. The node's agent connects
    /// again, unless the deny list (tunnel.gateway.denyFile) has the node or its certificate.
    End {
        /// The node.
        #[arg(value_parser = node_name)]
        node: String,
        /// The config file.
        #[command(flatten)]
        config: ConfigArgs,
    },
}

/// Returns an error if an argument can't be the name of a Node.
fn node_name(text: &str) -> Result<String, String> {
    let is_known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    if text.is_empty() || !text.chars().all(is_known) {
        return Err("must be a name of lower-case letters, digits, '-' and '.'".to_owned());
    }
    Ok(text.to_owned())
}

impl NodesArgs {
    pub(super) fn run(self) -> Result<(), QueryError> {
        if let Some(NodesCommand::End { node, config }) = self.command {
            return end_sessions(node, &config);
        }
        let body = self.query.request("/nodes")?;
        let now = Timestamp::now();
        let Some(name) = &self.name else {
            return print_response(self.query.output, &body, || {
                Ok(render(&parse::<Vec<_>>(&body)?, now))
            });
        };
        let mut all: Vec<NodeView> = parse(&body)?;
        all.retain(|node| node.node == *name);
        let [node] = all.as_slice() else {
            return Err(QueryError::NoNode(name.clone()));
        };
        let body = serde_json::to_vec(node).map_err(QueryError::InvalidResponse)?;
        print_response(self.query.output, &body, || Ok(render_details(node, now)))
    }
}

/// Ends the sessions of a node, and prints how many there were.
fn end_sessions(node: String, config: &ConfigArgs) -> Result<(), QueryError> {
    let socket = Config::read(&config.config)?.admin_socket();
    let path = format!("{END_SESSIONS_PATH}?node={node}");
    let body = runtime()?.block_on(admin::post(&socket, &path))?;
    let EndedSessions { ended } = parse(&body)?;
    if ended == 0 {
        return Err(QueryError::NoSession(node));
    }
    let noun = if ended == 1 { "session" } else { "sessions" };
    Ok(print(&format!("ended {ended} {noun} of node {node}"))?)
}

pub(super) fn render(nodes: &[NodeView], now: Timestamp) -> String {
    let mut rows = Vec::new();
    for node in nodes {
        let sessions = node.sessions.iter();
        let mut lines: Vec<_> = sessions.map(|session| session_row(session, now)).collect();
        if lines.is_empty() {
            let seen = node.last_seen.map_or_else(
                || "never connected".to_owned(),
                |seen| format!("last seen {} ago", age(seen, now)),
            );
            let mut line = vec!["not connected".to_owned(), seen];
            line.resize(COLUMNS.len() - 2, String::new());
            lines.push(line);
        }
        for (number, line) in lines.iter_mut().enumerate() {
            let skew = node.sessions.get(number).and_then(|session| {
                let skew = relative(session.large_clock_skew()?);
                Some(format!("its clock is {skew} the gateway's"))
            });
            let error = Some(last_error(node, now)).filter(|error| !error.is_empty());
            let problems: Vec<_> = skew.into_iter().chain(error).collect();
            line.push(problems.join("; "));
        }
        rows.extend(table::with_name_column(node.node.clone(), lines));
    }
    table::render(&COLUMNS, &rows)
}

/// Renders one node, and the clients that hold the most of its streams.
pub(super) fn render_details(node: &NodeView, now: Timestamp) -> String {
    let sessions = render(std::slice::from_ref(node), now);
    let clients = node.clients.iter();
    let rows: Vec<_> = clients
        .map(|it| vec![it.client.clone(), it.streams.to_string()])
        .collect();
    if rows.is_empty() {
        return sessions;
    }
    format!("{sessions}\n\n{}", table::render(&CLIENT_COLUMNS, &rows))
}

pub(super) const CLIENT_COLUMNS: [&str; 2] = ["CLIENT", "STREAMS"];

pub(super) const COLUMNS: [&str; 9] = [
    "NODE",
    "PEER",
    "SINCE",
    "RTT",
    "STREAMS",
    "IN",
    "OUT",
    "CERTIFICATE",
    "LAST ERROR",
];

/// Formats a difference between clocks.
pub(super) fn relative(seconds: f64) -> String {
    let direction = if seconds < 0.0 { "behind" } else { "ahead of" };
    format!("{:.0} s {direction}", seconds.abs())
}

/// Formats the time that a session's certificate is still valid, and its issuer.
fn certificate(session: &SessionView, now: Timestamp) -> String {
    let days_left = session.certificate_expires.duration_since(now).as_secs() / DAY;
    let mut text = match days_left {
        ..0 => "expired".to_owned(),
        _ => format!("{days_left} d"),
    };
    if !session.certificate_issuer.is_empty() {
        text = format!("{text} by {}", session.certificate_issuer);
    }
    text
}

/// Formats a node's last error and its age.
fn last_error(node: &NodeView, now: Timestamp) -> String {
    let error = node.last_error.as_ref();
    let aged = error.map(|error| match node.last_error_at {
        Some(at) => format!("{} ago: {error}", age(at, now)),
        None => error.clone(),
    });
    aged.unwrap_or_default()
}

fn session_row(session: &SessionView, now: Timestamp) -> Vec<String> {
    let traffic = &session.traffic;
    let rtt = traffic.rtt_seconds;
    let rtt = if traffic.suspect {
        Some("no answer".to_owned())
    } else {
        rtt.map(|rtt| format!("{:.1} ms", rtt * 1000.0))
    };
    vec![
        session.peer.to_string(),
        age(session.since, now),
        table::or_dash(rtt),
        traffic.streams.to_string(),
        format_bytes(traffic.bytes_in),
        format_bytes(traffic.bytes_out),
        certificate(session, now),
    ]
}

const DAY: i64 = 86_400;

/// Formats the time since a timestamp in a single unit.
fn age(since: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(since).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / DAY),
    }
}

#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "printed with one decimal"
)]
fn format_bytes(count: u64) -> String {
    match count {
        0..10_000 => format!("{count} B"),
        10_000..10_000_000 => format!("{:.1} kB", count as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", count as f64 / 1e6),
        _ => format!("{:.1} GB", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::{
        cli::{Cli, Command, QueryCommand},
        tunnel::{ClientView, TrafficView},
    };

    fn second(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn sessions_are_ended_only_of_a_node_that_is_named() {
        let parse = |words: &[&str]| Cli::try_parse_from([&["culvert", "nodes"], words].concat());
        let ends = |words: &[&str]| {
            let command = parse(words).expect("valid").command;
            let Command::Query(QueryCommand::Nodes(args)) = command else {
                panic!("another command");
            };
            let ends = args.command.map(|NodesCommand::End { node, .. }| node);
            (args.name, ends)
        };
        let text = |text: &str| Some(text.to_owned());

        assert_eq!(ends(&[]), (None, None));
        assert_eq!(
            ends(&["edge-7", "--output", "json"]),
            (text("edge-7"), None)
        );
        assert_eq!(ends(&["end", "edge-7"]), (None, text("edge-7")));
        assert_eq!(
            ends(&["--", "end"]),
            (text("end"), None),
            "a node with this name"
        );
        for words in [
            &["end"][..],
            &["end", "Edge 7"],
            &["end", "a&node=b"],
            &["a", "end", "b"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn each_session_has_a_row_and_so_has_a_node_without_sessions() {
        let session = SessionView {
            name: "a".to_owned(),
            peer: "192.0.2.7:4242".parse().expect("an address"),
            since: second(1_000),
            release: "0.1.0".to_owned(),
            boot: String::new(),
            certificate_expires: second(1_000 + 30 * DAY),
            certificate_issuer: "O=culvert, CN=culvert CA 1".to_owned(),
            clock_skew_seconds: Some(0.2),
            traffic: TrafficView {
                rtt_seconds: Some(0.0123),
                suspect: false,
                streams: 3,
                bytes_in: 12_345,
                bytes_out: 7,
            },
        };
        let node = |name: &str, sessions, last_seen, last_error: Option<&str>| NodeView {
            node: name.to_owned(),
            sessions,
            last_seen,
            last_error: last_error.map(str::to_owned),
            last_error_at: last_error.map(|_| second(1_050)),
            clients: Vec::new(),
        };
        let mut silent = session.clone();
        silent.traffic.suspect = true;
        silent.clock_skew_seconds = Some(-86_400.0);
        let (sessions, error) = (vec![session, silent], "agent not connected");
        let nodes = [
            node("edge-1", sessions, Some(second(1_060)), None),
            node("edge-2", Vec::new(), Some(second(1_018)), Some(error)),
            node("edge-3", Vec::new(), None, None),
        ];

        let expected = "\
NODE     PEER             SINCE                RTT         STREAMS   IN        OUT   CERTIFICATE                          LAST ERROR
edge-1   192.0.2.7:4242   60 s                 12.3 ms     3         12.3 kB   7 B   29 d by O=culvert, CN=culvert CA 1
         192.0.2.7:4242   60 s                 no answer   3         12.3 kB   7 B   29 d by O=culvert, CN=culvert CA 1   its clock is 86400 s behind the gateway's
edge-2   not connected    last seen 42 s ago                                                                              10 s ago: agent not connected
edge-3   not connected    never connected";

        assert_eq!(render(&nodes, second(1_060)), expected);
    }

    #[test]
    fn the_clients_of_a_single_node_follow_its_sessions() {
        let client = |client: &str, streams| ClientView {
            client: client.to_owned(),
            streams,
        };
        let node = NodeView {
            node: "edge-3".to_owned(),
            clients: vec![client("10.0.0.5", 188), client("host", 3)],
            ..NodeView::default()
        };

        let expected = "\
NODE     PEER            SINCE             RTT   STREAMS   IN   OUT   CERTIFICATE   LAST ERROR
edge-3   not connected   never connected

CLIENT     STREAMS
10.0.0.5   188
host       3";
        assert_eq!(render_details(&node, second(1_060)), expected);
    }
}
