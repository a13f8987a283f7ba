//! Applies events of lists and watches to the overlay, and tracks invalid objects. A list is applied once
//! it is complete. No I/O.

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

/// The origin of problems in objects of the API server.
const ORIGIN: &str = "API server";

/// Kinds whose first lists are applied at the same time.
const TOGETHER: [Kind; 2] = [Kind::Service, Kind::EndpointSlice];

/// Kinds whose lists are not waited for, since the maps do not depend on them.
const UNUSED: [Kind; 1] = [Kind::ServiceCidr];

/// Selects the parts of Nodes that are kept in memory.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeFilter {
    /// The name of the own node, whose Node is kept completely.
    pub(super) own: String,
    /// The keys of the labels that are kept of other Nodes.
    pub(super) labels: BTreeSet<String>,
}

impl NodeFilter {
    /// Separates an object from its errors, and drops its unused parts.
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

    /// Drops the unused labels of other Nodes, of which there may be thousands.
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

/// The state of all kinds.
#[derive(Debug)]
pub(super) struct Reflector {
    kinds: BTreeMap<Kind, Said>,
    nodes: NodeFilter,
    /// A description of the data in use, until the API server has responded for the first time.
    stale: Option<String>,
    /// True if the file of the last known state is up to date, or is being written.
    pub(super) is_saved: bool,
}

/// The state of one kind.
#[derive(Debug, Default)]
struct Said {
    /// The list that is being received.
    listing: Option<Listing>,
    /// A complete list that is applied together with that of another kind.
    waiting: Option<Listing>,
    /// True if a complete list was applied.
    synced: bool,
    /// The errors of each invalid object.
    flaws: BTreeMap<ObjectId, Flaws>,
    /// The error while requests fail, and the time of the first failure.
    trouble: Option<(String, Timestamp)>,
}

/// A list that is being received.
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

/// Replaces the errors of an object.
fn note(all: &mut BTreeMap<ObjectId, Flaws>, id: &ObjectId, flaws: Option<Flaws>) {
    match flaws {
        Some(flaws) => all.insert(id.clone(), flaws),
        None => all.remove(id),
    };
}

/// The errors of an invalid object.
#[derive(Debug)]
struct Flaws {
    uid: Option<Arc<str>>,
    /// The name of the Service, if the object is an EndpointSlice.
    owner: Option<Arc<str>>,
    /// True if the object was refused; otherwise only the invalid fields are ignored.
    is_refused: bool,
    fields: Vec<Invalid>,
}

/// An object separated from its errors.
struct Read {
    id: ObjectId,
    /// `None` if the object was refused, so that its last valid version stays; `Some(None)` if Culvert
    /// does not serve the object.
    object: Option<Option<Object>>,
    flaws: Option<Flaws>,
}

impl Reflector {
    /// Creates the state of these kinds, without objects.
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

    /// Applies an event.
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

    /// Applies the change of one object.
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

    /// Applies the complete lists. The first lists of Services and slices are applied together, since a
    /// Service without its endpoints would refuse connects.
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

    /// Applies a complete list. Objects that are not in the list are deleted; invalid ones keep their last
    /// version.
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

    /// Returns true if a complete list was applied for every kind on which the maps depend.
    pub(super) fn is_live(&self) -> bool {
        let mut needed = self
            .kinds
            .iter()
            .filter(|(kind, _)| !UNUSED.contains(*kind));
        needed.all(|(_, said)| said.synced)
    }

    /// Uses the last known state until the server responds. Objects that are missing from it do not count
    /// as deleted.
    pub(super) fn use_snapshot(&mut self, snapshot: Option<Snapshot>, edit: &mut Edit<'_>) {
        let stale = snapshot.as_ref().map_or_else(
            || "no objects are known yet".to_owned(),
            |snapshot| format!("using the last known state of {}", snapshot.written),
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

    /// Returns all invalid fields with their objects.
    fn flaws(&self) -> impl Iterator<Item = (&ObjectId, &Flaws, &Invalid)> {
        let objects = self.kinds.values().flat_map(|said| &said.flaws);
        objects.flat_map(|(id, flaws)| flaws.fields.iter().map(move |field| (id, flaws, field)))
    }

    /// Returns a warning for each invalid field. A warning about a slice is attached to its Service, where
    /// operators look first.
    pub(super) fn concerns(&self, overlay: &Overlay) -> Vec<Concern> {
        let concern = |(id, flaws, invalid): (&ObjectId, &Flaws, &Invalid)| {
            let reason = if flaws.is_refused {
                Reason::ObjectRejected
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

    /// Returns the report for status.
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
                error: trouble.as_ref().map(|(_, why)| why.clone()),
                error_since: trouble.map(|(since, _)| since.to_string()),
                stale: self.stale.clone(),
            }),
            ..Report::default()
        }
    }
}

#[cfg(test)]
mod tests;
