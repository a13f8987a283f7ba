//! Explains connections and datagrams of sockets: the choice of the programs is repeated in memory.

use tunnel_common::{
    addr::{Address, Protocol},
    affinity::Client,
    decide::{self, ClientContext, ClientScalars, Identity, Traffic},
    flow::Endpoint,
    lookup::Lookup,
    reason::Reason,
    steering::SteeringKey,
};

use super::{Explanation, Kind, Outcome, Question, describe, describe_frontend, text};
use crate::{bpf::ServiceLookup, reconcile::PortNames};

/// A socket, whose address identifies the client.
struct Sender {
    address: Address,
    is_host: bool,
}

impl ClientContext for Sender {
    fn client(&self, _is_v4: bool) -> Identity {
        Identity {
            client: ClientScalars::new(&Client::of_address(self.address)),
            is_by_source: true,
        }
    }

    fn is_bound_to_loopback(&self, _is_v4: bool) -> bool {
        false
    }

    fn is_known_host(&self) -> bool {
        self.is_host
    }
}

/// Explains what a socket of the sender meets.
pub(super) fn explain(
    question: &Question,
    sender: &str,
    (maps, names): (&ServiceLookup, &PortNames),
) -> Result<Explanation, String> {
    let mut answer = Explanation::new(question, Kind::Socket);
    answer.step("socket", format!("a socket of {sender} connects or sends"));
    answer.notes.push(
        "the programs at the sockets see only processes in the cgroup of the node and its pods; packets of others on this \
         host are translated where they leave by an uplink, and those of pods only with service.packets.links: all; \
         name the link with --by"
            .to_owned(),
    );
    if question.protocol == Protocol::SCTP {
        let why = "the kernel runs no program when a socket of SCTP connects, whose packets keep this address";
        return Ok(answer.leave_alone("socket", why));
    }
    let key = question.key();
    let context = Sender {
        address: question.sender().address,
        is_host: sender == "this host",
    };
    let Some(found) = maps.frontend(&key, &question.client()).map_err(describe)? else {
        return steering(question, answer, maps);
    };
    answer.service = Some(names.name(found.frontend.service));
    let record = match decide::find_frontend(&found, &context, &key, Traffic::Sockets) {
        Lookup::Found(record) => record,
        Lookup::None => {
            return Ok(answer.leave_alone(
                "frontend",
                "the frontend does not serve this socket, whose packets keep this address",
            ));
        }
        Lookup::Unstable => return Err("the frontend changes: ask again".to_owned()),
    };
    let set = Traffic::Sockets.set(&found.frontend);
    answer.step("frontend", describe_frontend(&found, set, names));
    match decide::choose_backend(&found, &context, &key, record, Traffic::Sockets) {
        Ok(choice) => {
            let backend = text(Endpoint::new(choice.address, choice.port));
            let how = if choice.reason == Reason::TranslatedAffinity {
                "session affinity remembers it"
            } else {
                "the algorithm chooses it now"
            };
            answer.step("choice", format!("{backend}: {how}"));
            answer.step(
                "hook",
                "the socket connects to the backend; its peer name stays the address that it has dialled",
            );
            answer.set_reason(choice.reason);
            answer.backend = Some(backend);
            answer.seen_as = Some(question.from.ip().to_string());
            answer.outcome = Outcome::Delivered;
        }
        Err(none) => {
            answer.set_reason(none.reason());
            answer.step("choice", none.reason().meaning());
            answer.outcome = if none.is_drop() {
                Outcome::Dropped
            } else {
                Outcome::Refused
            };
            let error = if none.is_drop() {
                "no route to host"
            } else {
                "connection refused"
            };
            answer.step("hook", format!("the system call fails: {error}"));
        }
    }
    Ok(answer)
}

/// Explains a connection to an address that is no frontend.
fn steering(
    question: &Question,
    mut answer: Explanation,
    maps: &ServiceLookup,
) -> Result<Explanation, String> {
    let to = question.receiver();
    let key = SteeringKey::new(to.address, to.port);
    let record = maps.steering(&key).map_err(describe)?;
    match record.filter(|_| question.protocol == Protocol::TCP) {
        Some(record) => {
            let at = Endpoint::new(record.steering_address, record.ingress_port);
            answer.step(
                "steering",
                format!(
                    "an edge node's port: connects to the ingress at {}",
                    text(at)
                ),
            );
            answer.outcome = Outcome::Steered;
            answer.set_reason(Reason::Steered);
            Ok(answer)
        }
        None => {
            Ok(answer.leave_alone("frontend", "no Service has this address, port and protocol"))
        }
    }
}
