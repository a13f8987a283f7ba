//! What a file says, document by document. Pure: text in, objects and refusals out.

mod json;

use std::{
    collections::HashMap,
    hash::{BuildHasher as _, RandomState},
    iter,
    panic::catch_unwind,
    sync::Arc,
};

use serde_json::Value;
use serde_saphyr::{DefaultMessageFormatter, MessageFormatter as _};

pub(super) use self::json::of_json;
use super::documents::{self, Document};
use crate::{
    k8s::{self, Manifest, Refused, Taken},
    model::{Object, ObjectId},
    parallel,
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
    let documents = documents::split(text);
    let key = |document: &Document<'_>| {
        let hash = memory.hasher.hash_one(document.text);
        (hash, document.text.len())
    };
    let known: Vec<_> = documents
        .iter()
        .map(|document| {
            let key = key(document);
            let said = last.and_then(|last| last.said.get(&key)).map(Arc::clone);
            (key, said)
        })
        .collect();
    let news: Vec<_> = documents
        .iter()
        .zip(&known)
        .filter_map(|(document, (_, said))| said.is_none().then_some(*document))
        .collect();
    let read = |_, document: &Document<'_>| Words::from(of_document(*document));
    let mut news = parallel::each(&news, FEW, read).into_iter();
    let mut statements = Vec::with_capacity(documents.len());
    for (document, (key, said)) in documents.into_iter().zip(known) {
        let Some(said) = said.or_else(|| news.next()) else {
            break;
        };
        statements.extend(said.iter().map(|(line, said)| Statement {
            document: document.number,
            line: document.line + *line,
            said: said.clone(),
        }));
        memory.said.insert(key, said);
    }
    (statements, memory)
}

/// Fewer documents or items than these are parsed where they are.
const FEW: usize = 64;

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

/// What a manifest says.
fn of_value(value: Value) -> Vec<Said> {
    said_of(k8s::parse(value))
}

/// What a manifest that was parsed says. A list is taken apart.
fn said_of(parsed: Result<Manifest, Refused>) -> Vec<Said> {
    match parsed {
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
