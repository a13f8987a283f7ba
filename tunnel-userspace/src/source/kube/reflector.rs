//! Writes what is heard of the API server to the overlay, whole lists at once, and knows what of it
//! can't be used. No I/O.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use tunnel_common::reason::Reason;

use super::{
    follow::{Heard, What},
    snapshot::Snapshot,
};
use crate::{
    k8s::{Arrived, Invalid, Taken},
    model::{Concern, Kind, Node, Object, ObjectId, ObjectName},
    source::{
        Overlay, Problem, Report, Server,
        store::{Edit, Phase},
    },
};

/// Where problems of these objects are told to come from.
const ORIGIN: &str = "API server";

/// Kinds whose first lists are taken at once.
const TOGETHER: [Kind; 2] = [Kind::Service, Kind::EndpointSlice];

/// Kinds that nothing waits for, as nothing is programmed from them.
const UNUSED: [Kind; 1] = [Kind::ServiceCidr];

/// What is kept of Nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeFilter {
    /// The Node that is kept as it is: this one.
    pub(super) own: String,
    /// The labels that are kept of all others.
    pub(super) labels: BTreeSet<String>,
}

impl NodeFilter {
    /// What an object is, without what nobody reads of it.
    fn read(&self, arrived: Arrived) -> Read {
        let Arrived {
            id,
            version: _,
            uid,
            owner,
            object,
        } = arrived;
        let (object, is_refused, fields) = match object {
            Ok(None) => (Some(None), false, Vec::new()),
            Ok(Some(Taken { object, ignored })) => (Some(Some(self.trim(object))), false, ignored),
            Err(invalid) => (None, true, vec![invalid]),
        };
        let flaws = (!fields.is_empty()).then_some(Flaws {
            uid,
            owner,
            is_refused,
            fields,
        });
        Read { id, object, flaws }
    }

    /// Drops what nobody reads of other Nodes: there may be thousands, with dozens of labels each.
    fn trim(&self, object: Object) -> Object {
        let Object::Node(node) = &object else {
            return object;
        };
        if *node.name.name == *self.own {
            return object;
        }
        let labels = node
            .labels
            .iter()
            .filter(|(key, _)| self.labels.contains(*key));
        Object::Node(Arc::new(Node {
            labels: labels
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
            ..Node::clone(node)
        }))
    }
}

/// The state of the lists and watches of all kinds.
#[derive(Debug)]
pub(super) struct Reflector {
    kinds: BTreeMap<Kind, Said>,
    nodes: NodeFilter,
    /// What is used in place of an API server that wasn't heard of yet.
    stale: Option<String>,
    /// Whether the file on disk holds all objects, or will once it is written.
    pub(super) is_saved: bool,
}

/// What was said of one kind.
#[derive(Debug, Default)]
struct Said {
    /// The list that is coming in.
    listing: Option<Listing>,
    /// A list that is complete, and waits for that of another kind.
    waiting: Option<Listing>,
    /// Whether a whole list has come.
    synced: bool,
    flaws: BTreeMap<ObjectId, Flaws>,
    /// Why the server can't be asked, and since when.
    trouble: Option<(String, Timestamp)>,
}

/// A list that is coming in.
#[derive(Debug, Default)]
struct Listing {
    objects: BTreeMap<ObjectId, Option<Object>>,
    flaws: BTreeMap<ObjectId, Flaws>,
}

impl Listing {
    fn take(&mut self, read: Read) {
        let Read { id, object, flaws } = read;
        note(&mut self.flaws, &id, flaws);
        if let Some(object) = object {
            self.objects.insert(id, object);
        }
    }
}

/// Takes note of what is wrong with an object now.
fn note(all: &mut BTreeMap<ObjectId, Flaws>, id: &ObjectId, flaws: Option<Flaws>) {
    match flaws {
        Some(flaws) => all.insert(id.clone(), flaws),
        None => all.remove(id),
    };
}

/// What is wrong with an object.
#[derive(Debug)]
struct Flaws {
    uid: Option<Arc<str>>,
    /// The Service that it belongs to.
    owner: Option<Arc<str>>,
    /// Whether the object was refused; else its fields are left out.
    is_refused: bool,
    fields: Vec<Invalid>,
}

/// What was read of an object.
struct Read {
    id: ObjectId,
    /// The object as it is now, which is nothing where Culvert has no part in it; nothing at all if
    /// it was refused, which leaves its last good version.
    object: Option<Option<Object>>,
    flaws: Option<Flaws>,
}

impl Reflector {
    /// Nothing was said yet of these kinds.
    pub(super) fn new(kinds: impl IntoIterator<Item = Kind>, nodes: NodeFilter) -> Self {
        Self {
            kinds: kinds
                .into_iter()
                .map(|kind| (kind, Said::default()))
                .collect(),
            nodes,
            stale: None,
            is_saved: true,
        }
    }

    /// Takes what was heard.
    pub(super) fn take(&mut self, heard: Heard, now: Timestamp, edit: &mut Edit<'_>) {
        let Heard { kind, at, what } = heard;
        edit.at = at;
        let said = self.kinds.entry(kind).or_default();
        match what {
            What::Failed(why) => {
                let since = said.trouble.take().map_or(now, |(_, since)| since);
                said.trouble = Some((why, since));
                return;
            }
            What::Answers => {
                said.trouble = None;
                return;
            }
            What::ListBegins => {
                said.listing = Some(Listing::default());
                return;
            }
            What::Listed(arrived) => {
                let read = self.nodes.read(*arrived);
                said.listing.get_or_insert_default().take(read);
                return;
            }
            What::ListEnds => {
                said.waiting = Some(said.listing.take().unwrap_or_default());
                self.release(edit);
            }
            What::Absent => {
                (said.listing, said.waiting) = (None, Some(Listing::default()));
                self.release(edit);
            }
            What::Changed(arrived) => self.change(*arrived, edit),
            What::Gone(mut arrived) => {
                arrived.object = Ok(None);
                self.change(*arrived, edit);
            }
        }
        if let Some(said) = self.kinds.get_mut(&kind) {
            said.trouble = None;
        }
        self.settle(edit);
    }

    /// Takes one object.
    fn change(&mut self, arrived: Arrived, edit: &mut Edit<'_>) {
        let read = self.nodes.read(arrived);
        let said = self.kinds.entry(read.id.kind).or_default();
        if let Some(waiting) = &mut said.waiting {
            waiting.take(read);
            return;
        }
        let Read { id, object, flaws } = read;
        note(&mut said.flaws, &id, flaws);
        if let Some(object) = object {
            self.put(&id, object, edit);
        }
    }

    /// Takes the lists that are complete. Services and their slices are taken together the first
    /// time: a Service without the endpoints that it has would refuse connects.
    fn release(&mut self, edit: &mut Edit<'_>) {
        let is_ready = |kind: &Kind| {
            let said = self.kinds.get(kind);
            said.is_none_or(|said| said.synced || said.waiting.is_some())
        };
        let are_together = TOGETHER.iter().all(is_ready);
        let ready: Vec<Kind> = self
            .kinds
            .iter()
            .filter(|(kind, said)| {
                said.waiting.is_some() && (are_together || !TOGETHER.contains(*kind))
            })
            .map(|(kind, _)| *kind)
            .collect();
        for kind in ready {
            let said = self.kinds.entry(kind).or_default();
            said.synced = true;
            if let Some(listing) = said.waiting.take() {
                self.replace(kind, listing, edit);
            }
        }
    }

    /// Takes a whole list: what is not in it is gone, but what of it can't be read stays.
    fn replace(&mut self, kind: Kind, listing: Listing, edit: &mut Edit<'_>) {
        let Listing { objects, flaws } = listing;
        let is_gone = |id: &ObjectId| !objects.contains_key(id) && !flaws.contains_key(id);
        let gone: Vec<ObjectId> = edit.ids(kind).filter(is_gone).collect();
        for id in gone {
            self.put(&id, None, edit);
        }
        for (id, object) in objects {
            self.put(&id, object, edit);
        }
        self.kinds.entry(kind).or_default().flaws = flaws;
    }

    fn put(&mut self, id: &ObjectId, object: Option<Object>, edit: &mut Edit<'_>) {
        self.is_saved &= !edit.put(id, object);
    }

    fn settle(&mut self, edit: &mut Edit<'_>) {
        if !self.is_live() {
            return;
        }
        self.stale = None;
        let mut flaws = self.kinds.values().flat_map(|said| said.flaws.values());
        edit.set_phase(if flaws.all(|flaws| !flaws.is_refused) {
            Phase::Whole
        } else {
            Phase::Partial
        });
    }

    /// Whether a whole list of every kind has come that something is programmed from.
    pub(super) fn is_live(&self) -> bool {
        let mut needed = self
            .kinds
            .iter()
            .filter(|(kind, _)| !UNUSED.contains(*kind));
        needed.all(|(_, said)| said.synced)
    }

    /// Goes on with what an earlier process wrote, or with nothing, until the server is heard of.
    /// What is missing from it must not be taken for deleted.
    pub(super) fn use_snapshot(&mut self, snapshot: Option<Snapshot>, edit: &mut Edit<'_>) {
        let stale = snapshot.as_ref().map_or_else(
            || "nothing is known yet".to_owned(),
            |snapshot| format!("what is known is of {}", snapshot.written),
        );
        self.stale = Some(stale);
        for object in snapshot.into_iter().flat_map(|snapshot| snapshot.objects) {
            let is_heard = self
                .kinds
                .get(&object.kind())
                .is_none_or(|said| said.synced);
            if !is_heard {
                self.put(&object.id(), Some(object), edit);
            }
        }
        edit.set_phase(Phase::Stale);
    }

    /// Every field that can't be used.
    fn flaws(&self) -> impl Iterator<Item = (&ObjectId, &Flaws, &Invalid)> {
        let objects = self.kinds.values().flat_map(|said| &said.flaws);
        objects.flat_map(|(id, flaws)| flaws.fields.iter().map(move |field| (id, flaws, field)))
    }

    /// What an operator must act on. What is wrong with a slice is told of its Service, where people
    /// look.
    pub(super) fn concerns(&self, overlay: &Overlay) -> Vec<Concern> {
        let concern = |(id, flaws, invalid): (&ObjectId, &Flaws, &Invalid)| {
            let reason = if flaws.is_refused {
                Reason::ObjectRefused
            } else {
                Reason::FieldIgnored
            };
            let owner = flaws.owner.as_ref().and_then(|owner| {
                let name = ObjectName::new(Arc::clone(&id.name.namespace), Arc::clone(owner));
                let kind = Kind::Service;
                let about = ObjectId { kind, name };
                let Object::Service(service) = overlay.get(&about)? else {
                    return None;
                };
                Some((about, service.uid.clone(), format!("{id}: {invalid}")))
            });
            let (about, uid, note) =
                owner.unwrap_or_else(|| (id.clone(), flaws.uid.clone(), invalid.to_string()));
            Concern {
                about,
                uid,
                reason,
                note,
            }
        };
        self.flaws().map(concern).collect()
    }

    /// What has been read, for status.
    pub(super) fn report(&self, server: String, overlay: &Overlay) -> Report {
        let problems = self.flaws().map(|(id, flaws, invalid)| Problem {
            object: Some(id.to_string()),
            field: (!invalid.field.is_empty()).then(|| invalid.field.clone()),
            ignored: !flaws.is_refused,
            ..Problem::of(ORIGIN, invalid.reason.to_string())
        });
        let troubles = self.kinds.iter().filter_map(|(kind, said)| {
            let (why, since) = said.trouble.as_ref()?;
            Some((*since, format!("{kind}: {why}")))
        });
        let trouble = troubles.min();
        Report {
            objects: overlay.counts(),
            problems: problems.collect(),
            synced: overlay.phase() > Phase::Listing,
            server: Some(Server {
                address: server,
                trouble: trouble.as_ref().map(|(_, why)| why.clone()),
                trouble_since: trouble.map(|(since, _)| since.to_string()),
                stale: self.stale.clone(),
            }),
            ..Report::default()
        }
    }
}

#[cfg(test)]
mod tests;
