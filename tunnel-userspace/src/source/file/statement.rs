//! What a file says, document by document. Pure: text in, objects and refusals out.

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    iter,
    panic::catch_unwind,
    sync::Arc,
};

use serde_json::Value;
use serde_saphyr::{DefaultMessageFormatter, MessageFormatter as _};

use super::documents::{self, Document};
use crate::{
    k8s::{self, Manifest, Refused, Taken},
    model::{Object, ObjectId},
};

/// One thing that a file says, and where.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Statement {
    /// The document, counted from 1.
    pub(super) document: usize,
    /// The line: where the text stops making sense, else where the content begins.
    pub(super) line: usize,
    /// What it says.
    pub(super) said: Said,
}

/// What a document, or an item of a list, says.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    /// An object that Culvert uses.
    Object(Object),
    /// An object that Culvert has no part in.
    Skipped(ObjectId),
    /// A kind that Culvert doesn't read.
    Unknown(String),
    /// Something that can't be used.
    Refused {
        id: Option<ObjectId>,
        field: Option<String>,
        reason: String,
    },
    /// A field that is left out of an object that is used.
    Ignored {
        id: ObjectId,
        field: String,
        reason: String,
    },
}

/// What was said by each document of a file, so that a document that stays as it is need not be
/// parsed again. The key is a hash of the text under a key of this process, and the length.
#[derive(Debug, Default)]
pub(super) struct Memory {
    hasher: RandomState,
    said: HashMap<(u64, usize), Words>,
}

/// What one document says: usually one thing. The number is the line within the document.
type Words = Arc<[(usize, Said)]>;

/// Reads a file of YAML, with what is remembered of its last version.
pub(super) fn of_yaml(text: &str, last: Option<&Memory>) -> (Vec<Statement>, Memory) {
    let mut memory = Memory::default();
    if let Some(last) = last {
        memory.hasher = last.hasher.clone();
    }
    let mut statements = Vec::new();
    for document in documents::split(text) {
        let key = (memory.hasher.hash_one(document.text), document.text.len());
        let said = last
            .and_then(|last| last.said.get(&key))
            .map_or_else(|| Arc::from(of_document(document)), Arc::clone);
        statements.extend(said.iter().map(|(line, said)| Statement {
            document: document.number,
            line: document.line.saturating_add(*line),
            said: said.clone(),
        }));
        memory.said.insert(key, said);
    }
    (statements, memory)
}

/// Reads a file of JSON: values one after the other. What comes after one that can't be parsed
/// can't be found.
pub(super) fn of_json(text: &str) -> Vec<Statement> {
    let mut statements = Vec::new();
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let mut lines = Lines {
        text,
        offset: 0,
        line: 1,
    };
    for document in 1.. {
        let line = lines.of_next(values.byte_offset());
        match values.next() {
            None => break,
            Some(Ok(value)) => {
                let said = guarded(move || of_value(value));
                let place = |said| Statement {
                    document,
                    line,
                    said,
                };
                statements.extend(said.into_iter().map(place));
            }
            Some(Err(error)) => {
                let said = refused(format!("is not JSON: {error}"));
                statements.push(Statement {
                    document,
                    line: error.line().max(1),
                    said,
                });
                break;
            }
        }
    }
    statements
}

/// Counts lines up to growing offsets.
struct Lines<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
}

impl Lines<'_> {
    /// The line of the first thing at or after an offset.
    fn of_next(&mut self, offset: usize) -> usize {
        let rest = self.text.get(offset..).unwrap_or_default();
        let blank = rest.len().saturating_sub(rest.trim_start().len());
        let end = offset.saturating_add(blank);
        let passed = self.text.get(self.offset..end).unwrap_or_default();
        self.line = self.line.saturating_add(passed.matches('\n').count());
        self.offset = end;
        self.line
    }
}

/// What one document of YAML says, with lines counted from 0 within it.
fn of_document(document: Document<'_>) -> Vec<(usize, Said)> {
    let text = document.text;
    let parsed = catch_unwind(|| serde_saphyr::from_str_with_options(text, options()));
    match parsed {
        Ok(Ok(Value::Null)) => Vec::new(),
        Ok(Ok(value)) => {
            let line = document.first_line();
            let said = guarded(move || of_value(value));
            said.into_iter().map(|said| (line, said)).collect()
        }
        Ok(Err(error)) => {
            let line = error.location().map_or(1, |location| location.line());
            let line = usize::try_from(line).unwrap_or(1).saturating_sub(1);
            let message = DefaultMessageFormatter.format_message(&error);
            let reason = format!("is not YAML: {}", message.replace(char::is_control, " "));
            vec![(line, refused(reason))]
        }
        Err(_) => vec![(document.first_line(), refused(BROKEN))],
    }
}

/// How YAML is read. What the text itself holds is bounded by the size of the file; what aliases
/// make of it is bounded here.
fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: usize::MAX,
            max_nodes: usize::MAX,
            max_total_scalar_bytes: usize::MAX,
            max_aliases: 1_000,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 100_000,
            max_replay_stack_depth: 16,
        },
        emit_comments: false,
        with_snippet: false,
    }
}

const BROKEN: &str = "can't be read: the parser failed";

/// Runs a parser, so that if it panics only this document is lost.
fn guarded(parse: impl FnOnce() -> Vec<Said> + std::panic::UnwindSafe) -> Vec<Said> {
    catch_unwind(parse).unwrap_or_else(|_| vec![refused(BROKEN)])
}

fn refused(reason: impl Into<String>) -> Said {
    Said::Refused {
        id: None,
        field: None,
        reason: reason.into(),
    }
}

/// What a manifest says. A list is taken apart.
fn of_value(value: Value) -> Vec<Said> {
    match k8s::parse(value) {
        Ok(Manifest::Object(Taken { object, ignored })) => {
            let id = object.id();
            let ignored = ignored.into_iter().map(|invalid| Said::Ignored {
                id: id.clone(),
                field: invalid.field,
                reason: invalid.reason.to_string(),
            });
            iter::once(Said::Object(object)).chain(ignored).collect()
        }
        Ok(Manifest::Skipped(id)) => vec![Said::Skipped(id)],
        Ok(Manifest::Unknown(kind)) => vec![Said::Unknown(kind)],
        Ok(Manifest::List(items)) => {
            let item = |(i, item)| of_value(item).into_iter().map(move |said| within(i, said));
            items.into_iter().enumerate().flat_map(item).collect()
        }
        Err(Refused { id, invalid }) => {
            let field = (!invalid.field.is_empty()).then_some(invalid.field);
            vec![Said::Refused {
                id,
                field,
                reason: invalid.reason.to_string(),
            }]
        }
    }
}

/// Names the item of a list in what was said of it.
fn within(item: usize, said: Said) -> Said {
    match said {
        Said::Refused { id, field, reason } => {
            let field = field.map_or_else(String::new, |field| format!(".{field}"));
            Said::Refused {
                id,
                field: Some(format!("items[{item}]{field}")),
                reason,
            }
        }
        Said::Ignored { id, field, reason } => Said::Ignored {
            id,
            field: format!("items[{item}].{field}"),
            reason,
        },
        Said::Object(_) | Said::Skipped(_) | Said::Unknown(_) => said,
    }
}

#[cfg(test)]
mod tests;
