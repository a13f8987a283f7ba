//! Parses a file document by document. Pure: converts text to objects and refusals.

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

pub(super) use self::json::json;
use super::documents::{self, Document};
use crate::{
    k8s::{self, Invalid, Manifest, Refused, Taken},
    model::{Object, ObjectId},
    parallel,
};

/// An item of a file, with its position.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Parsed {
    /// The document, counted from 1.
    pub(super) document: usize,
    /// The line of a syntax error, else the line where the content begins.
    pub(super) line: usize,
    /// The content.
    pub(super) content: Content,
}

/// The content of a document, or of an item of a list.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    /// An object that Culvert uses.
    Object(Object),
    /// An object that Culvert does not serve.
    Skipped(ObjectId),
    /// A kind that Culvert doesn't read.
    Unknown(String),
    /// An object or field that is refused.
    Invalid {
        id: Option<ObjectId>,
        field: Option<String>,
        reason: String,
        /// True if only the field is left out, and the object used without it.
        ignored: bool,
    },
}

/// The content of each document of a file, so that an unchanged document need not be parsed again. The
/// key is a hash of the text, with a seed of this process, and the length.
#[derive(Debug, Default)]
pub(super) struct Cache {
    hasher: RandomState,
    documents: HashMap<(u64, usize), Contents>,
}

/// The content of one document: usually one item. The number is the line within the document.
type Contents = Arc<(usize, Vec<Content>)>;

/// Parses a file of YAML; reuses the unchanged documents of its last version.
pub(super) fn yaml(text: &str, last: &Cache) -> (Vec<Parsed>, Cache) {
    let documents = documents::split(text);
    let read = |_, document: &Document<'_>| {
        let key = (last.hasher.hash_one(document.text), document.text.len());
        let known = last.documents.get(&key).map(Arc::clone);
        let content = known.unwrap_or_else(|| Arc::new(of_document(*document)));
        (key, content)
    };
    let read = parallel::each(&documents, FEW, read);
    let mut parsed = Vec::with_capacity(documents.len());
    for (document, (_, contents)) in documents.iter().zip(&read) {
        let (line, content) = &**contents;
        parsed.extend(content.iter().map(|content| Parsed {
            document: document.number,
            line: document.line + *line,
            content: content.clone(),
        }));
    }
    let cache = Cache {
        hasher: last.hasher.clone(),
        documents: read.into_iter().collect(),
    };
    (parsed, cache)
}

/// Below this number, documents or items are parsed sequentially.
const FEW: usize = 64;

/// Parses one document of YAML, with lines counted from 0 within it.
fn of_document(document: Document<'_>) -> (usize, Vec<Content>) {
    let parse = || match serde_saphyr::from_str_with_options(document.text, options()) {
        Ok(Value::Null) => (document.first_line(), Vec::new()),
        Ok(value) => (document.first_line(), of_value(value)),
        Err(error) => {
            let line = error.location().map_or(1, |location| location.line());
            let message = DefaultMessageFormatter.format_message(&error);
            let reason = format!("is not YAML: {}", message.replace(char::is_control, " "));
            // An error without a location has line 0.
            let line = usize::try_from(line).unwrap_or(1).saturating_sub(1);
            (line, vec![refused(reason)])
        }
    };
    let broken = |_| (document.first_line(), vec![refused(BROKEN)]);
    catch_unwind(parse).unwrap_or_else(broken)
}

/// Returns the options of the YAML parser. The file's size bounds the text itself; these limits bound
/// the expansion of aliases.
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

/// The error of a document on which the parser panics, so that only this one is lost.
const BROKEN: &str = "can't be read: the parser failed";

fn refused(reason: impl Into<String>) -> Content {
    Content::Invalid {
        id: None,
        field: None,
        reason: reason.into(),
        ignored: false,
    }
}

/// Parses a manifest.
fn of_value(value: Value) -> Vec<Content> {
    contents(k8s::parse(value))
}

/// Returns the content of a manifest. The items of a list become separate.
fn contents(parsed: Result<Manifest, Refused>) -> Vec<Content> {
    match parsed {
        Ok(Manifest::Object(Taken { object, ignored })) => {
            let id = object.id();
            let ignored = ignored
                .into_iter()
                .map(|invalid| of_invalid(Some(id.clone()), invalid, true));
            iter::once(Content::Object(object)).chain(ignored).collect()
        }
        Ok(Manifest::Skipped(id)) => vec![Content::Skipped(id)],
        Ok(Manifest::Unknown(kind)) => vec![Content::Unknown(kind)],
        Ok(Manifest::List(items)) => {
            let item = |(i, item)| {
                of_value(item)
                    .into_iter()
                    .map(move |content| within(i, content))
            };
            items.into_iter().enumerate().flat_map(item).collect()
        }
        Err(Refused { id, invalid }) => vec![of_invalid(id, invalid, false)],
    }
}

fn of_invalid(id: Option<ObjectId>, invalid: Invalid, ignored: bool) -> Content {
    Content::Invalid {
        id,
        field: (!invalid.field.is_empty()).then_some(invalid.field),
        reason: invalid.reason.to_string(),
        ignored,
    }
}

/// Prefixes the field of an invalid item with its index in the list.
fn within(item: usize, mut content: Content) -> Content {
    if let Content::Invalid { field, .. } = &mut content {
        let rest = field.take().map(|field| format!(".{field}"));
        *field = Some(format!("items[{item}]{}", rest.unwrap_or_default()));
    }
    content
}

#[cfg(test)]
mod tests;
