//! Parses the documents in a file into objects and errors. Does no I/O.

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

pub(super) use self::json::parse_json;
use super::documents::{self, Document};
use crate::{
    k8s::{self, FieldError, Manifest, ParseError, ParsedObject},
    model::{Object, ObjectId},
    parallel,
};

/// An item parsed from a file, and its position.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ParsedItem {
    /// The document's number within the file, counted from 1.
    pub(super) document: usize,
    /// The line of the syntax error if there is one; otherwise the line on which the document's content
    /// begins.
    pub(super) line: usize,
    /// The parsed object, or the error.
    pub(super) content: ItemContent,
}

/// The result of parsing a document or one item of a list.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ItemContent {
    /// An object that Culvert uses.
    Object(Object),
    /// An object that Culvert does not serve.
    Skipped(ObjectId),
    /// A kind that Culvert doesn't read.
    Unknown(String),
    /// An invalid object or field.
    Invalid {
        id: Option<ObjectId>,
        field: Option<String>,
        reason: String,
        /// True if only the field is ignored, and the object is used without it.
        ignored: bool,
    },
}

/// The parsed documents of a file, kept so that unchanged documents need not be parsed again. The key
/// consists of a seeded hash of the document's text and the length of the text.
#[derive(Debug, Default)]
pub(super) struct ParseCache {
    hasher: RandomState,
    documents: HashMap<(u64, usize), DocumentItems>,
}

/// A line within the document, counted from 0, and the document's items, of which there is usually one.
type DocumentItems = Arc<(usize, Vec<ItemContent>)>;

/// Parses a YAML file, reusing the results for documents that have not changed since the file's previous
/// version.
pub(super) fn parse_yaml(text: &str, last: &ParseCache) -> (Vec<ParsedItem>, ParseCache) {
    let documents = documents::split(text);
    let read = |_, document: &Document<'_>| {
        let key = (last.hasher.hash_one(document.text), document.text.len());
        let cached = last.documents.get(&key).map(Arc::clone);
        let content = cached.unwrap_or_else(|| Arc::new(parse_document(*document)));
        (key, content)
    };
    let read = parallel::map(&documents, MIN_PARALLEL, read);
    let mut parsed = Vec::with_capacity(documents.len());
    for (document, (_, contents)) in documents.iter().zip(&read) {
        let (line, content) = &**contents;
        parsed.extend(content.iter().map(|content| ParsedItem {
            document: document.number,
            line: document.line + *line,
            content: content.clone(),
        }));
    }
    let cache = ParseCache {
        hasher: last.hasher.clone(),
        documents: read.into_iter().collect(),
    };
    (parsed, cache)
}

/// If there are at least this many documents or items, they are parsed in parallel.
const MIN_PARALLEL: usize = 64;

/// Parses a YAML document. The returned line is counted from 0 within the document.
fn parse_document(document: Document<'_>) -> (usize, Vec<ItemContent>) {
    let parse = || match serde_saphyr::from_str_with_options(document.text, options()) {
        Ok(Value::Null) => (document.first_line(), Vec::new()),
        Ok(value) => (document.first_line(), parse_value(value)),
        Err(error) => {
            let line = error.location().map_or(1, |location| location.line());
            let message = DefaultMessageFormatter.format_message(&error);
            let reason = format!(
                "is not valid YAML: {}",
                message.replace(char::is_control, " ")
            );
            // The parser counts lines from 1, and returns 0 if the location is unknown.
            let line = usize::try_from(line).unwrap_or(1).saturating_sub(1);
            (line, vec![invalid_document(reason)])
        }
    };
    let panicked = |_| {
        (
            document.first_line(),
            vec![invalid_document(PARSER_PANICKED)],
        )
    };
    catch_unwind(parse).unwrap_or_else(panicked)
}

/// Returns the options for the YAML parser. The file size already limits the text, so only the expansion of
/// aliases needs limits here.
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

/// The error for a document that makes the parser panic. Other documents are not affected.
const PARSER_PANICKED: &str = "can't be parsed: the parser panicked";

fn invalid_document(reason: impl Into<String>) -> ItemContent {
    ItemContent::Invalid {
        id: None,
        field: None,
        reason: reason.into(),
        ignored: false,
    }
}

/// Parses a manifest from a YAML or JSON value.
fn parse_value(value: Value) -> Vec<ItemContent> {
    to_items(k8s::parse(value))
}

/// Converts a parsed manifest to items: the object and its ignored fields, or the items of a list.
fn to_items(parsed: Result<Manifest, ParseError>) -> Vec<ItemContent> {
    match parsed {
        Ok(Manifest::Object(ParsedObject { object, ignored })) => {
            let id = object.id();
            let ignored = ignored
                .into_iter()
                .map(|invalid| field_error(Some(id.clone()), invalid, true));
            iter::once(ItemContent::Object(object))
                .chain(ignored)
                .collect()
        }
        Ok(Manifest::Skipped(id)) => vec![ItemContent::Skipped(id)],
        Ok(Manifest::Unknown(kind)) => vec![ItemContent::Unknown(kind)],
        Ok(Manifest::List(items)) => {
            let item = |(i, item)| {
                parse_value(item)
                    .into_iter()
                    .map(move |content| prefix_with_item(i, content))
            };
            items.into_iter().enumerate().flat_map(item).collect()
        }
        Err(ParseError {
            id,
            field_error: invalid,
        }) => vec![field_error(id, invalid, false)],
    }
}

fn field_error(id: Option<ObjectId>, invalid: FieldError, ignored: bool) -> ItemContent {
    ItemContent::Invalid {
        id,
        field: (!invalid.field.is_empty()).then_some(invalid.field),
        reason: invalid.kind.to_string(),
        ignored,
    }
}

/// Prefixes the field in an error with the index of the list item that contains it.
fn prefix_with_item(item: usize, mut content: ItemContent) -> ItemContent {
    if let ItemContent::Invalid { field, .. } = &mut content {
        let rest = field.take().map(|field| format!(".{field}"));
        *field = Some(format!("items[{item}]{}", rest.unwrap_or_default()));
    }
    content
}

#[cfg(test)]
mod tests;
