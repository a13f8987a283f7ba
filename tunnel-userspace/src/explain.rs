//! Explains what becomes of a packet or connection, and why, by the programs and maps of this node. Nothing is changed.
//!
//! - `packet`: runs the programs that translate packets on a frame, on maps of their own for what they write
//! - `socket`: repeats the choice of the programs at the sockets in memory
//! - `frame`: builds and reads frames

mod frame;
mod packet;
mod socket;

use std::{net::SocketAddr, sync::Arc};

use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, watch};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    affinity::Client,
    flow::Endpoint,
    reason::Reason,
    service::{FrontendKey, IndexRange},
};

use crate::{
    bpf::{FrontendLookup, PacketTrials, PinDirectory, ServiceLookup},
    error_chain,
    net::{Origin, PacketsView, Way, way_to},
    reconcile::{PortNames, PublishedServices},
};

/// The port of a sender that the question leaves out.
const PORT: u16 = 40_000;

/// The step for packets between addresses of this host.
const TO_ITSELF: &str = "the receiver is an address of this host: its packets reach no link";

/// The maximum number of backends that an explanation lists.
const MAX_LISTED: usize = 8;

/// A packet or connection to explain.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Question {
    /// The sender. If its port is 0, any port.
    pub from: SocketAddr,
    /// The receiver.
    pub to: SocketAddr,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The link by which the packet arrives, or leaves if the sender is this host. If `None`, it is the one of the kernel's route
    /// to the sender.
    pub link: Option<String>,
}

/// The kind of traffic that an explanation is about.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// A socket of this node or of one of its pods.
    Socket,
    /// A packet that arrives, or one of this host whose socket meets no program.
    Packet,
}

/// The outcome for a packet or connection.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// It reaches a backend.
    Delivered,
    /// It is sent to the tunnel.
    Steered,
    /// It is refused: the sender learns it.
    Refused,
    /// It is dropped silently.
    Dropped,
    /// Culvert leaves it alone, so it goes where it is addressed to.
    #[default]
    LeftAlone,
}

impl Outcome {
    /// Returns the outcome in words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Delivered => "delivered",
            Self::Steered => "sent to the tunnel",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
            Self::LeftAlone => "left alone",
        }
    }
}

/// One step of an explanation.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ExplainedStep {
    /// The place, such as `frontend` or `in`.
    pub at: String,
    /// A description of what happens there.
    pub what: String,
}

/// The answer to a [`Question`].
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The sender.
    pub from: String,
    /// The receiver.
    pub to: String,
    /// The transport protocol.
    pub protocol: String,
    /// The kind of traffic.
    pub kind: Kind,
    /// The outcome.
    pub outcome: Outcome,
    /// The reason that the programs count, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The Service port, if the receiver is a frontend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// The backend. If several could be chosen, one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// The sender, as the backend sees it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_as: Option<String>,
    /// The steps, in order.
    pub steps: Vec<ExplainedStep>,
    /// The limits of the explanation.
    pub notes: Vec<String>,
}

impl Explanation {
    fn new(question: &Question, kind: Kind) -> Self {
        Self {
            from: question.from.to_string(),
            to: question.to.to_string(),
            protocol: question.protocol.to_string(),
            kind,
            outcome: Outcome::default(),
            reason: None,
            service: None,
            backend: None,
            seen_as: None,
            steps: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn step(&mut self, at: impl Into<String>, what: impl Into<String>) {
        self.steps.push(ExplainedStep {
            at: at.into(),
            what: what.into(),
        });
    }

    fn set_reason(&mut self, reason: Reason) {
        self.reason = Some(reason.label().to_owned());
    }

    /// Ends the explanation: the packet goes on as it is.
    fn leave_alone(mut self, at: impl Into<String>, why: impl Into<String>) -> Self {
        self.outcome = Outcome::LeftAlone;
        self.step(at, why);
        self
    }
}

impl Question {
    fn sender(&self) -> Endpoint {
        let port = if self.from.port() == 0 {
            PORT
        } else {
            self.from.port()
        };
        Endpoint::new(Address::from_ip(self.from.ip()), Port::from_host(port))
    }

    fn receiver(&self) -> Endpoint {
        Endpoint::new(
            Address::from_ip(self.to.ip()),
            Port::from_host(self.to.port()),
        )
    }

    fn key(&self) -> FrontendKey {
        let to = self.receiver();
        FrontendKey::new(to.address, to.port, self.protocol)
    }

    fn client(&self) -> Client {
        Client::of_address(Address::from_ip(self.from.ip()))
    }

    /// Returns the origin of a packet that this host sends.
    const fn origin_here(&self) -> Origin {
        Origin {
            source: self.from.ip(),
            link: None,
        }
    }

    /// Returns the way of a packet that this host sends to the receiver.
    async fn way_from_here(&self) -> Result<Way, String> {
        let way = way_to(self.to.ip(), Some(self.origin_here()));
        way.await.map_err(describe)
    }
}

/// Returns an endpoint as text.
fn text(endpoint: Endpoint) -> String {
    SocketAddr::new(endpoint.address.to_ip(), endpoint.port.to_host()).to_string()
}

/// Explains packets and connections.
#[derive(Debug)]
pub struct Explainer {
    pins: Arc<PinDirectory>,
    trials: Option<PacketTrials>,
    services: PublishedServices,
    packets: watch::Receiver<PacketsView>,
    /// Held while the programs are loaded for an explanation, so that there is one at a time.
    running: Mutex<()>,
}

impl Explainer {
    /// Creates an explainer. Without `trials`, packets are not translated.
    #[must_use]
    pub fn new(
        pins: Arc<PinDirectory>,
        trials: Option<PacketTrials>,
        services: PublishedServices,
        packets: watch::Receiver<PacketsView>,
    ) -> Self {
        Self {
            pins,
            trials,
            services,
            packets,
            running: Mutex::default(),
        }
    }

    /// Answers a question.
    ///
    /// # Errors
    ///
    /// Returns a description of the problem if the question can't be answered.
    pub async fn explain(&self, question: &Question) -> Result<Explanation, String> {
        let _running = self.running.lock().await;
        let maps = ServiceLookup::open(&self.pins).map_err(describe)?;
        let names = self.services.port_names(None);
        let maps = (&maps, &names);
        let way = way_to(question.from.ip(), None).await.map_err(describe)?;
        match (way, &question.link) {
            (Way::Local, Some(link)) => {
                let answer = Explanation::new(question, Kind::Packet);
                match question.way_from_here().await? {
                    Way::Local => Ok(answer.leave_alone("route", TO_ITSELF)),
                    Way::Link { .. } | Way::None(_) => {
                        self.packet_of_host(question, answer, link, maps).await
                    }
                }
            }
            (_, Some(link)) => self.packet(question, link, maps).await,
            (Way::Local, None) => self.socket_of_host(question, maps).await,
            (Way::Link { name, .. }, None) => {
                let PacketsView {
                    uplinks, pod_links, ..
                } = self.packets.borrow().clone();
                let is_packet = question.protocol == Protocol::SCTP && pod_links.contains(&name);
                if is_packet || uplinks.contains(&name) {
                    return self.packet(question, &name, maps).await;
                }
                let sender = format!("a pod of this node, behind {name}");
                let answer = socket::explain(question, &sender, maps)?;
                // The program at the link gets the packets that those at the sockets leave alone.
                if answer.outcome != Outcome::LeftAlone || !pod_links.contains(&name) {
                    return Ok(answer);
                }
                self.arriving(question, answer, &name, maps).await
            }
            (Way::None(why), None) => Err(format!(
                "this host has no way to {} ({why}), so it is not known by which link its packets arrive: name it \
                 with --by",
                question.from.ip()
            )),
        }
    }

    /// Explains a connection or datagram of this host. If the programs at the sockets leave it alone, follows its packet.
    async fn socket_of_host(
        &self,
        question: &Question,
        maps: (&ServiceLookup, &PortNames),
    ) -> Result<Explanation, String> {
        let answer = socket::explain(question, "this host", maps)?;
        let is_for_packets = answer.service.is_some() || question.protocol == Protocol::SCTP;
        if answer.outcome != Outcome::LeftAlone || !is_for_packets {
            return Ok(answer);
        }
        match question.way_from_here().await? {
            Way::Link { name, .. } => self.packet_of_host(question, answer, &name, maps).await,
            Way::Local => Ok(answer.leave_alone("route", TO_ITSELF)),
            Way::None(why) => {
                let why = format!("this host has no way to the receiver: {why}");
                Ok(answer.leave_alone("route", why))
            }
        }
    }

    async fn packet_of_host(
        &self,
        question: &Question,
        answer: Explanation,
        link: &str,
        maps: (&ServiceLookup, &PortNames),
    ) -> Result<Explanation, String> {
        let view = self.packets.borrow().clone();
        let (link, trials) = ((link, &view), self.trials.as_ref());
        packet::explain_of_host(question, answer, link, trials, maps).await
    }

    async fn packet(
        &self,
        question: &Question,
        link: &str,
        maps: (&ServiceLookup, &PortNames),
    ) -> Result<Explanation, String> {
        let answer = Explanation::new(question, Kind::Packet);
        self.arriving(question, answer, link, maps).await
    }

    /// Explains a packet that arrives by a link. `answer` has the steps before.
    async fn arriving(
        &self,
        question: &Question,
        answer: Explanation,
        link: &str,
        maps: (&ServiceLookup, &PortNames),
    ) -> Result<Explanation, String> {
        let view = self.packets.borrow().clone();
        let (link, trials) = ((link, &view), self.trials.as_ref());
        packet::explain(question, answer, link, trials, maps).await
    }
}

/// Returns an error and its causes in one line.
fn describe(error: impl std::error::Error + 'static) -> String {
    error_chain::chain(&error)
}

/// Describes a frontend, and the set from which a backend is chosen.
fn describe_frontend(found: &FrontendLookup, set: IndexRange, names: &PortNames) -> String {
    let frontend = &found.frontend;
    let kind = if set == frontend.cluster {
        "policy Cluster"
    } else {
        "policy Local"
    };
    let backends: Vec<String> = found
        .backends(set)
        .map(|backend| text(Endpoint::new(backend.address, backend.port)))
        .collect();
    let listed = backends.len().min(MAX_LISTED);
    let more = if backends.len() > listed { ", ..." } else { "" };
    let ranges = match frontend.source_ranges.len {
        0 => String::new(),
        count => format!(", {count} source ranges"),
    };
    let affinity = match frontend.affinity_timeout {
        0 => String::new(),
        timeout => format!(", session affinity for {timeout} s"),
    };
    format!(
        "{}, {kind}, algorithm {}{affinity}{ranges}; backends: {}{more}",
        names.name(frontend.service),
        frontend.algorithm.label(),
        if backends.is_empty() {
            "none".to_owned()
        } else {
            backends.get(..listed).unwrap_or_default().join(", ")
        },
    )
}
