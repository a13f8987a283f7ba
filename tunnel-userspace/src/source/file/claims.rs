//! Which file has the say over which object: what each file says now, or said last where it
//! can't be understood, and whose word counts where several speak of one object.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map, hash_map::Entry},
    path::Path,
    sync::Arc,
};

use foldhash::HashMap;

use super::statement::{Said, Statement};
use crate::{
    model::{Object, ObjectId},
    source::{Problem, UnknownKind, store::Edit},
};

/// What every file says.
#[derive(Debug, Default)]
pub(super) struct Claims {
    files: BTreeMap<Arc<Path>, File>,
    /// The files that speak of an object, first the one that counts.
    holders: HashMap<ObjectId, Vec<Arc<Path>>>,
    /// The objects that several files speak of.
    contested: BTreeSet<ObjectId>,
}

/// What one file says.
#[derive(Debug, Default)]
struct File {
    objects: BTreeMap<ObjectId, Claim>,
    problems: Vec<Problem>,
    unknown: BTreeSet<String>,
}

/// What a file says of one object.
#[derive(Clone, Debug)]
struct Claim {
    /// The object, or nothing if the file describes one that Culvert has no part in.
    object: Option<Object>,
    document: usize,
    line: usize,
}

impl Claims {
    /// Takes what a file says now. What it said of an object that is now refused stays; where a
    /// document can't even be told whose it is, all that it said and doesn't say anew stays, as
    /// any of it may be the one.
    pub(super) fn replace(
        &mut self,
        path: &Arc<Path>,
        statements: Vec<Statement>,
        edit: &mut Edit<'_>,
    ) {
        let mut last = self.files.remove(path).unwrap_or_default().objects;
        let before: Vec<ObjectId> = last.keys().cloned().collect();
        let mut file = File::default();
        let mut is_complete = true;
        // The documents that were refused.
        let mut refused: BTreeMap<ObjectId, usize> = BTreeMap::new();
        for Statement {
            document,
            line,
            said,
        } in statements
        {
            let problem = |id: Option<&ObjectId>, field, reason| Problem {
                document: Some(document),
                line: Some(line),
                object: id.map(ToString::to_string),
                field,
                ..Problem::of_file(path, reason)
            };
            let (id, object) = match said {
                Said::Object(object) => (object.id(), Some(object)),
                Said::Skipped(id) => (id, None),
                Said::Unknown(kind) => {
                    file.unknown.insert(kind);
                    continue;
                }
                Said::Ignored { id, field, reason } => {
                    file.problems.push(Problem {
                        ignored: true,
                        ..problem(Some(&id), Some(field), reason)
                    });
                    continue;
                }
                Said::Refused { id, field, reason } => {
                    file.problems.push(problem(id.as_ref(), field, reason));
                    is_complete &= id.is_some();
                    let is_said =
                        |id: &ObjectId| refused.contains_key(id) || file.objects.contains_key(id);
                    if let Some(id) = id.filter(|id| !is_said(id)) {
                        file.objects.extend(last.remove_entry(&id));
                        refused.insert(id, document);
                    }
                    continue;
                }
            };
            let twice = |id: &ObjectId, first| {
                let reason = format!("is already described by document {first} of this file");
                problem(Some(id), None, reason)
            };
            if let Some(first) = refused.get(&id) {
                file.problems.push(twice(&id, *first));
                continue;
            }
            match file.objects.entry(id) {
                btree_map::Entry::Vacant(place) => {
                    place.insert(Claim {
                        object,
                        document,
                        line,
                    });
                }
                btree_map::Entry::Occupied(claim) => {
                    let first = claim.get().document;
                    file.problems.push(twice(claim.key(), first));
                }
            }
        }
        if !is_complete {
            let unsaid = last
                .into_iter()
                .filter(|(id, _)| !refused.contains_key(id) && !file.objects.contains_key(id));
            let unsaid: Vec<_> = unsaid.collect();
            file.objects.extend(unsaid);
        }
        self.put(path, before, file, edit);
    }

    /// Takes note that a file can't be read. What it said last stays.
    pub(super) fn keep(&mut self, path: &Arc<Path>, problem: Problem) {
        let file = self.files.entry(Arc::clone(path)).or_default();
        file.problems = vec![problem];
    }

    /// Takes note that a file has another name. What it said counts as said under the new name
    /// too, so that what of it is refused there stays.
    pub(super) fn adopt(&mut self, from: &Path, to: &Arc<Path>, edit: &mut Edit<'_>) {
        let Some(objects) = self.files.get(from).map(|file| file.objects.clone()) else {
            return;
        };
        let mut file = self.files.remove(to).unwrap_or_default();
        let before = file.objects.keys().cloned().collect();
        file.objects.extend(objects);
        self.put(to, before, file, edit);
    }

    /// Takes note that a file is gone, and with it what it said.
    pub(super) fn remove(&mut self, path: &Arc<Path>, edit: &mut Edit<'_>) {
        let Some(last) = self.files.remove(path) else {
            return;
        };
        self.put(
            path,
            last.objects.into_keys().collect(),
            File::default(),
            edit,
        );
        self.files.remove(path);
    }

    /// Puts what a file says in place of what it said before, object by object.
    fn put(&mut self, path: &Arc<Path>, before: Vec<ObjectId>, file: File, edit: &mut Edit<'_>) {
        if before.is_empty() {
            self.holders.reserve(file.objects.len());
        }
        let gone: Vec<ObjectId> = before
            .into_iter()
            .filter(|id| !file.objects.contains_key(id))
            .collect();
        let mut unsettled = Vec::new();
        for (id, claim) in &file.objects {
            match self.holders.entry(id.clone()) {
                // Nobody else speaks of it.
                Entry::Vacant(place) => {
                    place.insert(vec![Arc::clone(path)]);
                    if let Some(object) = &claim.object {
                        edit.apply(object.clone());
                    }
                }
                Entry::Occupied(mut holders) => {
                    if let Err(place) = holders.get().binary_search(path) {
                        holders.get_mut().insert(place, Arc::clone(path));
                    }
                    unsettled.push(id.clone());
                }
            }
        }
        self.files.insert(Arc::clone(path), file);
        for id in &gone {
            if let Some(holders) = self.holders.get_mut(id) {
                holders.retain(|holder| holder != path);
            }
        }
        for id in gone.into_iter().chain(unsettled) {
            self.settle(id, edit);
        }
    }

    /// Writes what counts of one object.
    fn settle(&mut self, id: ObjectId, edit: &mut Edit<'_>) {
        let holders = self.holders.get(&id).map(Vec::as_slice).unwrap_or_default();
        let claim = holders
            .first()
            .and_then(|path| self.files.get(path)?.objects.get(&id));
        match claim.and_then(|claim| claim.object.clone()) {
            Some(object) => edit.apply(object),
            None => edit.remove(&id),
        };
        match holders.len() {
            0 => {
                self.holders.remove(&id);
                self.contested.remove(&id);
            }
            1 => {
                self.contested.remove(&id);
            }
            _ => {
                self.contested.insert(id);
            }
        }
    }

    /// All that is wrong with what the files say.
    pub(super) fn problems(&self) -> impl Iterator<Item = Problem> {
        let own = self
            .files
            .values()
            .flat_map(|file| file.problems.iter().cloned());
        own.chain(self.contested.iter().flat_map(|id| self.conflicts(id)))
    }

    /// The problems of an object that several files describe: one for each file but the first.
    fn conflicts(&self, id: &ObjectId) -> Vec<Problem> {
        let holders = self.holders.get(id).map(Vec::as_slice).unwrap_or_default();
        let Some((winner, losers)) = holders.split_first() else {
            return Vec::new();
        };
        let reason = format!("is already described by {}, which counts", winner.display());
        losers
            .iter()
            .filter_map(|path| {
                let claim = self.files.get(path)?.objects.get(id)?;
                Some(Problem {
                    document: Some(claim.document),
                    line: Some(claim.line),
                    object: Some(id.to_string()),
                    ..Problem::of_file(path, reason.clone())
                })
            })
            .collect()
    }

    /// The kinds that were left alone, by file.
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
