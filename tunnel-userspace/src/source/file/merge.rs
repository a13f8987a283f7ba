//! Merges the objects from all files. If a document is invalid, the last valid versions of its objects stay
//! in use. If several files define the same object, the first file by name takes precedence.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    path::Path,
    sync::Arc,
};

use foldhash::HashMap;

use super::parse::{ItemContent, ParsedItem};
use crate::{
    model::{Object, ObjectId},
    source::{Problem, UnknownKind, store::OverlayEdit},
};

/// The objects from all files.
#[derive(Debug, Default)]
pub(super) struct MergedObjects {
    files: BTreeMap<Arc<Path>, FileObjects>,
    /// The files that define each object, sorted by name; the first one takes precedence.
    defining_files: HashMap<ObjectId, Vec<Arc<Path>>>,
    /// The objects that are defined in several files.
    conflicting: BTreeSet<ObjectId>,
}

/// The objects in one file.
#[derive(Clone, Debug, Default)]
struct FileObjects {
    objects: BTreeMap<ObjectId, Definition>,
    problems: Vec<Problem>,
    unknown: BTreeSet<String>,
}

/// The definition of an object in a file.
#[derive(Clone, Debug)]
struct Definition {
    /// The object; `None` if Culvert does not serve it.
    object: Option<Object>,
    document: usize,
    line: usize,
}

impl MergedObjects {
    /// Replaces a file's objects. A rejected object keeps its last valid version. If a rejected document does
    /// not name its object, every object that the file no longer defines is kept, because any of them may be
    /// the rejected one.
    pub(super) fn replace(
        &mut self,
        path: &Arc<Path>,
        parsed: Vec<ParsedItem>,
        edit: &mut OverlayEdit<'_>,
    ) {
        let last = self.files.get(path).map(|file| &file.objects);
        let mut file = FileObjects::default();
        let mut all_named = true;
        // For each object, the number of the first document that defines it.
        let mut first_documents: BTreeMap<ObjectId, usize> = BTreeMap::new();
        for ParsedItem {
            document,
            line,
            content,
        } in parsed
        {
            let problem = |id: Option<&ObjectId>, field, reason, ignored| Problem {
                document: Some(document),
                line: Some(line),
                object: id.map(ToString::to_string),
                field,
                ignored,
                ..Problem::in_file(path, reason)
            };
            let (id, object) = match content {
                ItemContent::Object(object) => (object.id(), Some(Some(object))),
                ItemContent::Skipped(id) => (id, Some(None)),
                ItemContent::Unknown(kind) => {
                    file.unknown.insert(kind);
                    continue;
                }
                ItemContent::Invalid {
                    id,
                    field,
                    reason,
                    ignored,
                } => {
                    file.problems
                        .push(problem(id.as_ref(), field, reason, ignored));
                    all_named &= id.is_some();
                    let Some(id) = id.filter(|_| !ignored) else {
                        continue;
                    };
                    (id, None)
                }
            };
            match (first_documents.entry(id), object) {
                (Entry::Vacant(first), object) => {
                    let id = first.key().clone();
                    first.insert(document);
                    let definition = object.map(|object| Definition {
                        object,
                        document,
                        line,
                    });
                    let definition = definition.or_else(|| last?.get(&id).cloned());
                    file.objects
                        .extend(definition.map(|definition| (id, definition)));
                }
                (Entry::Occupied(first), Some(_)) => {
                    let reason = format!(
                        "is already defined in document {} of this file; remove one of them",
                        first.get()
                    );
                    let problem = problem(Some(first.key()), None, reason, false);
                    file.problems.push(problem);
                }
                (Entry::Occupied(_), None) => {}
            }
        }
        if !all_named {
            let last = last.into_iter().flatten();
            let kept = last.filter(|(id, _)| !first_documents.contains_key(*id));
            let kept = kept.map(|(id, definition)| (id.clone(), definition.clone()));
            file.objects.extend(kept);
        }
        self.put(path, file, edit);
    }

    /// Records that a file can't be read. Its objects stay in use.
    pub(super) fn record_unreadable(&mut self, path: &Arc<Path>, problem: Problem) {
        let file = self.files.entry(Arc::clone(path)).or_default();
        file.problems = vec![problem];
    }

    /// Moves a file's objects to another path. If another file had that path, its objects are also kept until
    /// the path is read again, since the new content may be invalid.
    pub(super) fn rename(&mut self, from: &Arc<Path>, to: &Arc<Path>, edit: &mut OverlayEdit<'_>) {
        if let Some(mut file) = self.files.get(from).cloned() {
            let last = self.files.get(to).map(|file| file.objects.clone());
            for (id, definition) in last.unwrap_or_default() {
                file.objects.entry(id).or_insert(definition);
            }
            self.put(to, file, edit);
            self.remove(from, edit);
        }
    }

    /// Removes a file and its objects.
    pub(super) fn remove(&mut self, path: &Arc<Path>, edit: &mut OverlayEdit<'_>) {
        self.put(path, FileObjects::default(), edit);
        self.files.remove(path);
    }

    /// Replaces a file's objects, and updates the overlay with the definitions that take precedence.
    fn put(&mut self, path: &Arc<Path>, file: FileObjects, edit: &mut OverlayEdit<'_>) {
        let last = self.files.remove(path).unwrap_or_default().objects;
        let removed = last.keys().filter(|id| !file.objects.contains_key(*id));
        let gone = removed.map(|id| (id, None));
        let defined = file
            .objects
            .iter()
            .map(|(id, definition)| (id, Some(definition)));
        for (id, definition) in gone.chain(defined) {
            let defining_files = self.defining_files.entry(id.clone());
            // Most objects are defined in only one file.
            let defining_files = defining_files.or_insert_with(|| Vec::with_capacity(1));
            match (defining_files.binary_search(path), definition) {
                (Ok(index), None) => drop(defining_files.remove(index)),
                (Err(index), Some(_)) => defining_files.insert(index, Arc::clone(path)),
                (Ok(_), Some(_)) | (Err(_), None) => {}
            }
            let first = match defining_files.first() {
                Some(first) if first == path => definition,
                first => first.and_then(|first| self.files.get(first)?.objects.get(id)),
            };
            edit.put(id, first.and_then(|definition| definition.object.clone()));
            if defining_files.len() > 1 {
                self.conflicting.insert(id.clone());
            } else {
                self.conflicting.remove(id);
            }
            if defining_files.is_empty() {
                self.defining_files.remove(id);
            }
        }
        self.files.insert(Arc::clone(path), file);
    }

    /// Returns the problems in all files.
    pub(super) fn problems(&self) -> impl Iterator<Item = Problem> {
        let own = self
            .files
            .values()
            .flat_map(|file| file.problems.iter().cloned());
        own.chain(self.conflicting.iter().flat_map(|id| self.conflicts(id)))
    }

    /// Returns a problem for each file that defines an object, except for the first one.
    fn conflicts(&self, id: &ObjectId) -> Vec<Problem> {
        let defining_files = self
            .defining_files
            .get(id)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let Some((winner, losers)) = defining_files.split_first() else {
            return Vec::new();
        };
        let reason = format!(
            "is already defined in {}, which has precedence; remove one of them",
            winner.display()
        );
        losers
            .iter()
            .filter_map(|path| {
                let definition = self.files.get(path)?.objects.get(id)?;
                Some(Problem {
                    document: Some(definition.document),
                    line: Some(definition.line),
                    object: Some(id.to_string()),
                    ..Problem::in_file(path, reason.clone())
                })
            })
            .collect()
    }

    /// Returns the unsupported kinds found in each file.
    pub(super) fn unknown(&self) -> impl Iterator<Item = UnknownKind> {
        self.files.iter().flat_map(|(path, file)| {
            let name = || path.display().to_string();
            file.unknown.iter().map(move |kind| UnknownKind {
                file: name(),
                kind: kind.clone(),
            })
        })
    }
}

#[cfg(test)]
mod tests;
