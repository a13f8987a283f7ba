//! Applies list and watch events to the overlay, and keeps track of invalid objects. A list is applied only
//! once it is complete. Does no I/O.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use tunnel_common::reason::Reason;

use super::{
    snapshot::Snapshot,
    watcher::{Change, KindEvent},
};
use crate::{
    k8s::{FieldError, ParsedObject, ReceivedObject},
    model::{Kind, Node, Object, ObjectId, ObjectName, ObjectWarning},
    source::{
        Overlay, Problem, ServerStatus, SourceReport,
        store::{OverlayEdit, SyncPhase},
    },
};

/// The origin of problems with objects from the API server.
const ORIGIN: &str = "API server";

/// The kinds whose first complete lists are applied together.
const APPLIED_TOGETHER: [Kind; 2] = [Kind::Service, Kind::EndpointSlice];

/// The kinds whose lists are not required for the source to count as synced, because Services and steering can be written
/// without them.
const OPTIONAL_KINDS: [Kind; 2] = [Kind::ServiceCidr, Kind::Pod];

/// Decides which parts of Nodes are kept in memory.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeFilter {
    /// The name of this node, whose Node is kept in full.
    pub(super) own: String,
    /// The keys of the labels that are kept on other Nodes.
    pub(super) labels: BTreeSet<String>,
}

impl NodeFilter {
    /// Separates an object from its errors, and drops the parts that are not used.
    fn filter(&self, object: ReceivedObject) -> FilteredObject {
        let ReceivedObject {
            id,
            version: _,
            uid,
            service,
            object,
        } = object;
        let (object, is_refused, fields) = match object {
            Ok(None) => (Some(None), false, Vec::new()),
            Ok(Some(ParsedObject { object, ignored })) => {
                (Some(Some(self.trim(object))), false, ignored)
            }
            Err(error) => (None, true, vec![error]),
        };
        let errors = (!fields.is_empty()).then_some(ObjectErrors {
            uid,
            service,
            is_refused,
            fields,
        });
        FilteredObject { id, object, errors }
    }

    /// Drops unused labels from other Nodes, of which there may be thousands.
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

/// The state of the lists and watches for all kinds.
#[derive(Debug)]
pub(super) struct Reflector {
    kinds: BTreeMap<Kind, KindState>,
    nodes: NodeFilter,
    /// A description of the data in use, if the API server has not responded since the daemon started.
    stale: Option<String>,
    /// True if the file with the last known state is up to date or is currently being written.
    pub(super) is_saved: bool,
}

/// The state of the list and watch for one kind.
#[derive(Debug, Default)]
struct KindState {
    /// The list that is being received.
    partial_list: Option<ReceivedList>,
    /// A complete list that is waiting to be applied together with the list of another kind.
    pending_list: Option<ReceivedList>,
    /// True once a complete list has been applied.
    synced: bool,
    /// The errors in each invalid object.
    errors: BTreeMap<ObjectId, ObjectErrors>,
    /// The current error and the time of the first failure, while requests are failing.
    failure: Option<(String, Timestamp)>,
}

impl KindState {
    /// Returns true if an object that is not known does not exist, according to the API server.
    fn is_current(&self) -> bool {
        let mut errors = self.errors.values();
        self.synced && self.failure.is_none() && errors.all(|errors| !errors.is_refused)
    }
}

/// A list that is being received.
#[derive(Debug, Default)]
struct ReceivedList {
    objects: BTreeMap<ObjectId, Option<Object>>,
    errors: BTreeMap<ObjectId, ObjectErrors>,
}

impl ReceivedList {
    fn insert(&mut self, object: FilteredObject) {
        let FilteredObject { id, object, errors } = object;
        set_errors(&mut self.errors, &id, errors);
        if let Some(object) = object {
            self.objects.insert(id, object);
        }
    }
}

/// Replaces the errors recorded for an object.
fn set_errors(
    all: &mut BTreeMap<ObjectId, ObjectErrors>,
    id: &ObjectId,
    errors: Option<ObjectErrors>,
) {
    match errors {
        Some(errors) => all.insert(id.clone(), errors),
        None => all.remove(id),
    };
}

/// The errors in an invalid object.
#[derive(Debug)]
struct ObjectErrors {
    uid: Option<Arc<str>>,
    /// The name of the Service that the object belongs to, if it is an EndpointSlice.
    service: Option<Arc<str>>,
    /// True if the object was rejected; false if only its invalid fields are ignored.
    is_refused: bool,
    fields: Vec<FieldError>,
}

/// An object that has been separated from its errors.
struct FilteredObject {
    id: ObjectId,
    /// `None` if the object was rejected and its last valid version stays in use; `Some(None)` if Culvert
    /// does not serve the object.
    object: Option<Option<Object>>,
    errors: Option<ObjectErrors>,
}

impl Reflector {
    /// Creates a reflector for the given kinds, which has not received any objects yet.
    pub(super) fn new(kinds: impl IntoIterator<Item = Kind>, nodes: NodeFilter) -> Self {
        Self {
            kinds: kinds
                .into_iter()
                .map(|kind| (kind, KindState::default()))
                .collect(),
            nodes,
            stale: None,
            is_saved: true,
        }
    }

    /// Applies an event.
    pub(super) fn apply(&mut self, event: KindEvent, now: Timestamp, edit: &mut OverlayEdit<'_>) {
        let KindEvent { kind, at, change } = event;
        edit.noticed_at = at;
        self.apply_change(kind, change, now, edit);
        if kind == Kind::Node {
            let state = self.kinds.get(&kind);
            edit.set_current_nodes(state.is_some_and(KindState::is_current));
        }
    }

    fn apply_change(
        &mut self,
        kind: Kind,
        change: Change,
        now: Timestamp,
        edit: &mut OverlayEdit<'_>,
    ) {
        let state = self.kinds.entry(kind).or_default();
        match change {
            Change::RequestFailed(error) => {
                let since = state.failure.take().map_or(now, |(_, since)| since);
                state.failure = Some((error, since));
                return;
            }
            Change::RequestSucceeded => {
                state.failure = None;
                return;
            }
            Change::ListStarted => {
                state.partial_list = Some(ReceivedList::default());
                return;
            }
            Change::Listed(object) => {
                let object = self.nodes.filter(*object);
                state.partial_list.get_or_insert_default().insert(object);
                return;
            }
            Change::ListCompleted => {
                state.pending_list = Some(state.partial_list.take().unwrap_or_default());
                self.apply_pending_lists(edit);
            }
            Change::Unsupported => {
                (state.partial_list, state.pending_list) = (None, Some(ReceivedList::default()));
                self.apply_pending_lists(edit);
            }
            Change::Updated(object) => self.change(*object, edit),
            Change::Deleted(mut object) => {
                object.object = Ok(None);
                self.change(*object, edit);
            }
        }
        if let Some(state) = self.kinds.get_mut(&kind) {
            state.failure = None;
        }
        self.update_phase(edit);
    }

    /// Applies a change to one object.
    fn change(&mut self, object: ReceivedObject, edit: &mut OverlayEdit<'_>) {
        let read = self.nodes.filter(object);
        let state = self.kinds.entry(read.id.kind).or_default();
        if let Some(pending) = &mut state.pending_list {
            pending.insert(read);
            return;
        }
        let FilteredObject { id, object, errors } = read;
        set_errors(&mut state.errors, &id, errors);
        if let Some(object) = object {
            self.put(&id, object, edit);
        }
    }

    /// Applies the lists that are complete. The first lists of Services and EndpointSlices are applied
    /// together, since connections to a Service without endpoints would be refused.
    fn apply_pending_lists(&mut self, edit: &mut OverlayEdit<'_>) {
        let is_ready = |kind: &Kind| {
            let state = self.kinds.get(kind);
            state.is_none_or(|state| state.synced || state.pending_list.is_some())
        };
        let are_together = APPLIED_TOGETHER.iter().all(is_ready);
        let ready: Vec<Kind> = self
            .kinds
            .iter()
            .filter(|(kind, state)| {
                state.pending_list.is_some() && (are_together || !APPLIED_TOGETHER.contains(*kind))
            })
            .map(|(kind, _)| *kind)
            .collect();
        for kind in ready {
            let state = self.kinds.entry(kind).or_default();
            state.synced = true;
            if let Some(list) = state.pending_list.take() {
                self.replace(kind, list, edit);
            }
        }
    }

    /// Applies a complete list. Objects that are missing from the list are deleted, and invalid objects keep
    /// their last valid version.
    fn replace(&mut self, kind: Kind, list: ReceivedList, edit: &mut OverlayEdit<'_>) {
        let ReceivedList { objects, errors } = list;
        let is_deleted = |id: &ObjectId| !objects.contains_key(id) && !errors.contains_key(id);
        let deleted: Vec<ObjectId> = edit.ids(kind).filter(is_deleted).collect();
        for id in deleted {
            self.put(&id, None, edit);
        }
        for (id, object) in objects {
            self.put(&id, object, edit);
        }
        self.kinds.entry(kind).or_default().errors = errors;
    }

    fn put(&mut self, id: &ObjectId, object: Option<Object>, edit: &mut OverlayEdit<'_>) {
        self.is_saved &= !edit.put(id, object);
    }

    fn update_phase(&mut self, edit: &mut OverlayEdit<'_>) {
        if !self.is_synced() {
            return;
        }
        self.stale = None;
        let mut errors = self.kinds.values().flat_map(|state| state.errors.values());
        edit.set_phase(if errors.all(|errors| !errors.is_refused) {
            SyncPhase::Complete
        } else {
            SyncPhase::Partial
        });
    }

    /// Returns true once a complete list has been applied for every kind that a BPF map depends on.
    pub(super) fn is_synced(&self) -> bool {
        let mut needed = self
            .kinds
            .iter()
            .filter(|(kind, _)| !OPTIONAL_KINDS.contains(*kind));
        needed.all(|(_, state)| state.synced)
    }

    /// Uses the last known state until the server responds. Objects that are missing from it do not count
    /// as deleted.
    pub(super) fn use_snapshot(&mut self, snapshot: Option<Snapshot>, edit: &mut OverlayEdit<'_>) {
        let stale = snapshot.as_ref().map_or_else(
            || "no objects are known yet".to_owned(),
            |snapshot| format!("using the last known state of {}", snapshot.written),
        );
        self.stale = Some(stale);
        for object in snapshot.into_iter().flat_map(|snapshot| snapshot.objects) {
            let is_synced = self
                .kinds
                .get(&object.kind())
                .is_none_or(|state| state.synced);
            if !is_synced {
                self.put(&object.id(), Some(object), edit);
            }
        }
        edit.set_phase(SyncPhase::Stale);
    }

    /// Returns all invalid fields, each with its object's ID and all errors in that object.
    fn invalid_fields(&self) -> impl Iterator<Item = (&ObjectId, &ObjectErrors, &FieldError)> {
        let objects = self.kinds.values().flat_map(|state| &state.errors);
        objects.flat_map(|(id, errors)| errors.fields.iter().map(move |field| (id, errors, field)))
    }

    /// Returns a warning for each invalid field. Warnings about an EndpointSlice are attached to its Service,
    /// which is where operators look first.
    pub(super) fn warnings(&self, overlay: &Overlay) -> Vec<ObjectWarning> {
        let warning = |(id, errors, error): (&ObjectId, &ObjectErrors, &FieldError)| {
            let reason = if errors.is_refused {
                Reason::ObjectRejected
            } else {
                Reason::FieldIgnored
            };
            let of_service = errors.service.as_ref().and_then(|service| {
                let name = ObjectName::new(Arc::clone(&id.name.namespace), Arc::clone(service));
                let kind = Kind::Service;
                let regarding = ObjectId { kind, name };
                let Object::Service(service) = overlay.get(&regarding)? else {
                    return None;
                };
                Some((regarding, service.uid.clone(), format!("{id}: {error}")))
            });
            let (regarding, uid, note) =
                of_service.unwrap_or_else(|| (id.clone(), errors.uid.clone(), error.to_string()));
            ObjectWarning {
                regarding,
                uid,
                reason,
                note,
            }
        };
        self.invalid_fields().map(warning).collect()
    }

    /// Returns the report for the daemon's status.
    pub(super) fn report(&self, server: String, overlay: &Overlay) -> SourceReport {
        let problems = self.invalid_fields().map(|(id, errors, error)| Problem {
            object: Some(id.to_string()),
            field: (!error.field.is_empty()).then(|| error.field.clone()),
            ignored: !errors.is_refused,
            ..Problem::new(ORIGIN, error.kind.to_string())
        });
        let failures = self.kinds.iter().filter_map(|(kind, state)| {
            let (error, since) = state.failure.as_ref()?;
            Some((*since, format!("{kind}: {error}")))
        });
        let failure = failures.min();
        SourceReport {
            objects: overlay.counts(),
            problems: problems.collect(),
            synced: overlay.phase() > SyncPhase::Listing,
            server: Some(ServerStatus {
                address: server,
                error: failure.as_ref().map(|(_, error)| error.clone()),
                error_since: failure.map(|(since, _)| since.to_string()),
                stale: self.stale.clone(),
            }),
            ..SourceReport::default()
        }
    }
}

#[cfg(test)]
mod tests;
