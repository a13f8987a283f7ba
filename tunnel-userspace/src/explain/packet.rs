//! Explains packets that arrive, and those of this host whose sockets meet no program: the programs are run on a frame, and the
//! kernel is asked for the way in between.

use tunnel_common::{
    affinity::AffinityKey,
    flow::{Endpoint, Flow},
    packet_link::PacketLink,
    reason::Reason,
};

use super::{
    Explanation, Outcome, Question, describe, describe_frontend,
    frame::{ends, first_of},
    text,
};
use crate::{
    bpf::{PacketTrial, PacketTrials, ServiceLookup},
    net::{Origin, PacketsView, Way, index_of_link, way_to},
    reconcile::PortNames,
};

/// The verdicts of the programs: the packet passes, is dropped, or goes back by the link that it came by.
const PASS: i32 = -1;
const DROP: i32 = 2;

/// Explains a packet that arrives by a link. `answer` has the steps before.
pub(super) async fn explain(
    question: &Question,
    mut answer: Explanation,
    (link, view): (&str, &PacketsView),
    trials: Option<&PacketTrials>,
    (maps, names): (&ServiceLookup, &PortNames),
) -> Result<Explanation, String> {
    answer.step("link", format!("a packet arrives by {link}"));
    let Some((trial, index)) = begin(&mut answer, (link, view), trials)? else {
        return Ok(answer);
    };
    let arrived = arrive(question, &mut answer, (&trial, index), (maps, names))?;
    let Some((frame, ends)) = arrived else {
        return Ok(answer);
    };
    let origin = Origin {
        source: question.from.ip(),
        link: Some(index),
    };
    let (_, backend) = ends;
    let way = way_to(backend.address.to_ip(), Some(origin))
        .await
        .map_err(describe)?;
    if matches!(&way, Way::Link { name, .. } if name == link) {
        trial.return_to(index, ends).map_err(describe)?;
    }
    leave(&mut answer, &trial, (&frame, way), view)?;
    Ok(answer)
}

/// Explains a packet of this host whose socket meets no program, and which leaves by a link. `answer` has the steps before.
pub(super) async fn explain_of_host(
    question: &Question,
    mut answer: Explanation,
    (link, view): (&str, &PacketsView),
    trials: Option<&PacketTrials>,
    (maps, names): (&ServiceLookup, &PortNames),
) -> Result<Explanation, String> {
    answer.step("link", format!("a packet of this host leaves by {link}"));
    let Some((trial, index)) = begin(&mut answer, (link, view), trials)? else {
        return Ok(answer);
    };
    let left = leave_host(question, &mut answer, (&trial, index), (maps, names))?;
    let Some((frame, (_, backend))) = left else {
        return Ok(answer);
    };
    let way = way_to(backend.address.to_ip(), Some(question.origin_here()))
        .await
        .map_err(describe)?;
    leave(&mut answer, &trial, (&frame, way), view)?;
    Ok(answer)
}

/// Begins a trial of the programs of a link, and returns it with the index of the link. There is none if the link has no
/// programs: the packet is left alone.
fn begin(
    answer: &mut Explanation,
    (link, view): (&str, &PacketsView),
    trials: Option<&PacketTrials>,
) -> Result<Option<(PacketTrial, u32)>, String> {
    answer.notes.push(
        "rules of netfilter (FORWARD, NetworkPolicies) and programs of others are not considered"
            .to_owned(),
    );
    answer.notes.extend(view.warnings.iter().cloned());
    let index = index_of_link(link).ok_or_else(|| format!("this host has no link {link}"))?;
    let Some(trials) = trials else {
        answer.step(link, "packets are not translated (service.packets.enabled)");
        return Ok(None);
    };
    if !has_programs(view, link) {
        let why = "the link has no programs that translate packets; `culvert status` lists those that have";
        answer.step(link, why);
        return Ok(None);
    }
    let trial = trials.begin().map_err(describe)?;
    Ok(Some((trial, index)))
}

/// Returns true if a link has the programs.
fn has_programs(view: &PacketsView, link: &str) -> bool {
    let mut links = view.uplinks.iter().chain(&view.pod_links);
    links.any(|it| it == link)
}

/// A frame, and the ends of its packet.
type Arrived = (Vec<u8>, (Endpoint, Endpoint));

/// Runs the program for packets that arrive. Returns the frame afterwards, if it goes on to a backend.
fn arrive(
    question: &Question,
    answer: &mut Explanation,
    (trial, link): (&PacketTrial, u32),
    (maps, names): (&ServiceLookup, &PortNames),
) -> Result<Option<Arrived>, String> {
    let (from, to) = (question.sender(), question.receiver());
    let known = look_up(question, answer, (trial, link), (maps, names))?;
    let frame = first_of(from, to, question.protocol);
    let run = trial.arrive(&frame, link).map_err(describe)?;
    let (reasons, why) = counted(answer, trial)?;
    if run.verdict != PASS {
        stop(answer, "in", run.verdict, &why);
        return Ok(None);
    }
    if run.frame == frame {
        answer.outcome = Outcome::LeftAlone;
        answer.step("in", "leaves the packet alone");
        return Ok(None);
    }
    let ends = ends(&run.frame).ok_or("the packet can't be read any more")?;
    let is_known = known.is_some_and(|flow| flow.backend_index == Flow::NO_BACKEND);
    answer.outcome = if is_known || reasons.contains(&Reason::Steered) {
        Outcome::Steered
    } else {
        Outcome::Delivered
    };
    answer.backend = Some(text(ends.1));
    answer.seen_as = Some(text(ends.0));
    answer.step("in", format!("the destination becomes {}", text(ends.1)));
    if ends.0 != from {
        answer.step(
            "in",
            format!("the client's port becomes {}", ends.0.port.to_host()),
        );
    }
    Ok(Some((run.frame, ends)))
}

/// Adds the frontend of a packet, and its flow, to the answer. `link` is that of the sender. Returns the flow.
fn look_up(
    question: &Question,
    answer: &mut Explanation,
    (trial, link): (&PacketTrial, u32),
    (maps, names): (&ServiceLookup, &PortNames),
) -> Result<Option<Flow>, String> {
    let (from, to) = (question.sender(), question.receiver());
    let known = trial
        .copy_flow(from, to, question.protocol)
        .map_err(describe)?;
    let found = maps
        .frontend(&question.key(), &question.client())
        .map_err(describe)?;
    if let Some(found) = &found {
        let set = trial
            .traffic(link, from.address)
            .map_err(describe)?
            .set(&found.frontend);
        answer.service = Some(names.name(found.frontend.service));
        answer.step("frontend", describe_frontend(found, set, names));
        let key = AffinityKey {
            client: question.client(),
            service: found.frontend.service,
        };
        trial.copy_affinity(&key).map_err(describe)?;
    } else {
        answer.step("frontend", "no Service has this address, port and protocol");
    }
    answer.step("flow", describe_flow(known.as_ref()));
    Ok(known)
}

/// Returns the reasons that the programs have counted, also as text, and adds the first one to the answer.
fn counted(answer: &mut Explanation, trial: &PacketTrial) -> Result<(Vec<Reason>, String), String> {
    let reasons = trial.reasons().map_err(describe)?;
    if let Some(reason) = reasons.first() {
        answer.set_reason(*reason);
    }
    let meanings = reasons.iter().map(|reason| reason.meaning());
    let why = meanings.collect::<Vec<_>>().join("; ");
    Ok((reasons, why))
}

/// Runs the program for packets that leave on a packet of this host. Returns the frame afterwards, if it goes on to a backend.
fn leave_host(
    question: &Question,
    answer: &mut Explanation,
    (trial, link): (&PacketTrial, u32),
    (maps, names): (&ServiceLookup, &PortNames),
) -> Result<Option<Arrived>, String> {
    let (from, to) = (question.sender(), question.receiver());
    look_up(question, answer, (trial, PacketLink::HOST), (maps, names))?;
    let frame = first_of(from, to, question.protocol);
    let run = trial.leave_host(&frame, link).map_err(describe)?;
    let (_, why) = counted(answer, trial)?;
    if run.verdict == PASS {
        answer.outcome = Outcome::LeftAlone;
        answer.step("out", "leaves the packet alone");
        return Ok(None);
    }
    // An answer comes from the receiver.
    let is_sent = |ends: &(Endpoint, Endpoint)| run.verdict != DROP && ends.0 != to;
    let Some(ends) = ends(&run.frame).filter(is_sent) else {
        stop(answer, "out", run.verdict, &why);
        return Ok(None);
    };
    answer.outcome = Outcome::Delivered;
    answer.backend = Some(text(ends.1));
    answer.step(
        "out",
        format!(
            "the destination becomes {}, and the packet is sent by the route to it",
            text(ends.1)
        ),
    );
    Ok(Some((run.frame, ends)))
}

/// Ends the explanation of a packet that a program drops, or to which it answers.
fn stop(answer: &mut Explanation, program: &str, verdict: i32, why: &str) {
    let (outcome, what) = if verdict == DROP {
        (Outcome::Dropped, "drops the packet")
    } else {
        (
            Outcome::Refused,
            "answers the packet by a reset or an ICMP error",
        )
    };
    answer.outcome = outcome;
    answer.step(program, format!("{what}: {why}"));
}

fn describe_flow(flow: Option<&Flow>) -> String {
    flow.map_or_else(
        || "none: a new flow begins if a frontend matches".to_owned(),
        |flow| {
            format!(
                "{} with the backend {}",
                flow.seen.phase(flow.protocol).label(),
                text(flow.backend)
            )
        },
    )
}

/// Follows the packet to the backend: by the stack to this host, or by a link.
fn leave(
    answer: &mut Explanation,
    trial: &PacketTrial,
    (frame, way): (&[u8], Way),
    view: &PacketsView,
) -> Result<(), String> {
    let (index, name, via) = match way {
        Way::Local => {
            answer.step("route", "the backend is in this host's network");
            return Ok(());
        }
        Way::None(why) => {
            answer.outcome = Outcome::Dropped;
            answer.step(
                "route",
                format!("this host forwards the packet nowhere: {why}"),
            );
            return Ok(());
        }
        Way::Link { index, name, via } => (index, name, via),
    };
    let by = via.map_or_else(String::new, |via| format!(" to the router {via}"));
    answer.step("route", format!("leaves by {name}{by}"));
    if !has_programs(view, &name) {
        answer.step(
            "out",
            format!("{name} has no programs: the packet leaves as it is"),
        );
        return Ok(());
    }
    let run = trial.leave(frame, index).map_err(describe)?;
    if run.verdict != PASS {
        let reasons = trial.reasons().map_err(describe)?;
        let lost = [
            Reason::PortsFull,
            Reason::FlowsFull,
            Reason::FlowUnallocated,
        ];
        let reason = reasons.iter().find(|reason| lost.contains(reason));
        answer.outcome = Outcome::Dropped;
        answer.reason = reason.map(|reason| reason.label().to_owned());
        answer.step(
            "out",
            "drops the packet: no port of this node can stand for the client",
        );
        return Ok(());
    }
    let (seen, _) = ends(&run.frame).ok_or("the packet can't be read any more")?;
    if run.frame == frame {
        answer.step("out", "the source stays: the backend sees the client");
    } else {
        answer.step(
            "out",
            format!("the source becomes {} (masqueraded)", text(seen)),
        );
    }
    answer.seen_as = Some(text(seen));
    Ok(())
}
