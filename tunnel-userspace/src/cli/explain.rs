//! `culvert explain`: shows what becomes of a packet or connection, and why.

use std::net::{IpAddr, SocketAddr};

use clap::Args;

use super::{QueryArgs, QueryError, parse, print_response, service_name, table};
use crate::{
    explain::{Explanation, Kind},
    reconcile::ServiceView,
};

/// The arguments of `culvert explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The sender: an address, or an address and a port, such as 203.0.113.9 or [2001:db8::9]:40000.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = sender)]
    from: SocketAddr,
    /// The receiver, such as 192.0.2.1:30080/TCP or [2001:db8::1]:53/UDP. The protocol is TCP if it is absent.
    #[arg(long, value_name = "ADDRESS:PORT[/PROTOCOL]", value_parser = receiver, required_unless_present = "service")]
    to: Option<Receiver>,
    /// The link by which the packet arrives. By default, it is the one of the route to the sender. A sender on this node is
    /// explained as a socket, otherwise as a packet. If the sender is this host, the link by which a packet leaves whose socket
    /// meets no program.
    #[arg(long, value_name = "LINK")]
    by: Option<String>,
    /// Explain packets to each address of this Service, NAME or NAMESPACE/NAME, in the family of the sender.
    #[arg(long, value_name = "SERVICE", value_parser = service_name, conflicts_with = "to")]
    service: Option<String>,
    #[command(flatten)]
    query: QueryArgs,
}

/// An address, a port and a protocol.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Receiver {
    at: SocketAddr,
    protocol: String,
}

/// Parses an address, with or without a port.
fn sender(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    address
        .or_else(|_no_ip| text.parse())
        .map_err(|_invalid| format!("`{text}` is neither an IP address nor an address and a port"))
}

/// Parses an address, a port and a protocol.
fn receiver(text: &str) -> Result<Receiver, String> {
    let (at, protocol) = text.rsplit_once('/').unwrap_or((text, "TCP"));
    let protocol = protocol.to_ascii_uppercase();
    if !matches!(protocol.as_str(), "TCP" | "UDP" | "SCTP") {
        return Err(format!(
            "the protocol `{protocol}` is none of TCP, UDP and SCTP"
        ));
    }
    let at = at.parse().map_err(|_invalid| {
        format!("`{at}` is not an address and a port, such as 192.0.2.1:80 or [2001:db8::1]:80")
    })?;
    Ok(Receiver { at, protocol })
}

impl ExplainArgs {
    /// Runs the query, and prints its result.
    pub(super) fn run(&self) -> Result<(), QueryError> {
        let by = self
            .by
            .iter()
            .map(|link| format!("&by={link}"))
            .collect::<String>();
        let Some(name) = &self.service else {
            let to = self.to.iter().cloned();
            return to.into_iter().try_for_each(|to| self.explain(&to, &by));
        };
        let body = self.query.request(&format!("/services?name={name}"))?;
        let services: Vec<ServiceView> = parse(&body)?;
        let receivers = receivers(&services, self.from.is_ipv4());
        if receivers.is_empty() {
            return Err(QueryError::NoService(name.clone()));
        }
        receivers.iter().try_for_each(|to| self.explain(to, &by))
    }

    fn explain(&self, to: &Receiver, by: &str) -> Result<(), QueryError> {
        let Receiver { at, protocol } = to;
        let path = format!(
            "/explain?from={}&to={at}&protocol={protocol}{by}",
            self.from
        );
        let body = self.query.request(&path)?;
        print_response(self.query.output, &body, || Ok(render(&parse(&body)?)))
    }
}

/// Returns the addresses of Services in one family.
fn receivers(services: &[ServiceView], is_v4: bool) -> Vec<Receiver> {
    let ports = services.iter().flat_map(|service| &service.ports);
    let frontends = ports.flat_map(|port| &port.frontends);
    frontends
        .filter_map(|frontend| receiver(&frontend.frontend).ok())
        .filter(|receiver| receiver.at.is_ipv4() == is_v4)
        .collect()
}

fn render(explanation: &Explanation) -> String {
    let kind = match explanation.kind {
        Kind::Socket => "socket",
        Kind::Packet => "packet",
    };
    let reason = explanation
        .reason
        .iter()
        .map(|reason| format!(" ({reason})"));
    let mut text = format!(
        "{kind} from {} to {}/{}: {}{}\n\n",
        explanation.from,
        explanation.to,
        explanation.protocol,
        explanation.outcome.words(),
        reason.collect::<String>(),
    );
    let rows = explanation.steps.iter();
    let rows: Vec<_> = rows
        .map(|step| vec![step.at.clone(), step.what.clone()])
        .collect();
    text.push_str(&table::render(&["AT", "WHAT HAPPENS"], &rows));
    let seen = explanation.seen_as.iter();
    let seen = seen
        .map(|seen| format!(", which sees {seen}"))
        .collect::<String>();
    if let Some(backend) = &explanation.backend {
        text.push_str(&format!("\n\nbackend: {backend}{seen}"));
    }
    for note in &explanation.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::{ExplainedStep, Outcome};

    #[test]
    fn a_sender_may_lack_the_port_and_a_receiver_the_protocol() {
        assert_eq!(
            sender("203.0.113.9"),
            Ok(SocketAddr::from(([203, 0, 113, 9], 0)))
        );
        assert_eq!(sender("[::1]:7").map(|it| it.port()), Ok(7));
        sender("web").expect_err("a name");
        let tcp = receiver("198.51.100.1:80").expect("good");
        assert_eq!(receiver("198.51.100.1:80/tcp"), Ok(tcp));
        let udp = receiver("[2001:db8::1]:53/UDP").expect("good");
        assert_eq!((udp.at.port(), udp.protocol.as_str()), (53, "UDP"));
        receiver("198.51.100.1:80/ICMP").expect_err("another protocol");
        receiver("198.51.100.1").expect_err("no port");
    }

    #[test]
    fn an_explanation_shows_its_steps_and_what_the_backend_sees() {
        let step = |at: &str, what: &str| ExplainedStep {
            at: at.to_owned(),
            what: what.to_owned(),
        };
        let text = render(&Explanation {
            from: "203.0.113.9:0".to_owned(),
            to: "192.0.2.1:30080".to_owned(),
            protocol: "TCP".to_owned(),
            kind: Kind::Packet,
            outcome: Outcome::Delivered,
            reason: Some("translated".to_owned()),
            service: Some("shop/web".to_owned()),
            backend: Some("10.1.0.3:8080".to_owned()),
            seen_as: Some("192.0.2.1:40000".to_owned()),
            steps: vec![
                step("link", "a packet arrives by eth0"),
                step("in", "translates"),
            ],
            notes: vec!["not all".to_owned()],
        });
        assert_eq!(
            text,
            "packet from 203.0.113.9:0 to 192.0.2.1:30080/TCP: delivered (translated)\n\n\
             AT     WHAT HAPPENS\n\
             link   a packet arrives by eth0\n\
             in     translates\n\n\
             backend: 10.1.0.3:8080, which sees 192.0.2.1:40000\n\
             note: not all"
        );
    }
}
