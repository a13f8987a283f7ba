//! Parses a JSON file.

use std::panic::catch_unwind;

use serde::Deserialize;
use serde_json::{Deserializer, value::RawValue};

use super::{
    ItemContent, MIN_PARALLEL, PARSER_PANICKED, ParsedItem, invalid_document, prefix_with_item,
    to_items,
};
use crate::{k8s, parallel};

/// A list as printed by `kubectl get -o json`, with its items left as text.
#[derive(Deserialize)]
struct List<'a> {
    kind: &'a str,
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

/// Parses a JSON file, which is a sequence of values. Parsing stops at the first syntax error.
pub(in crate::source::file) fn parse_json(text: &str) -> Vec<ParsedItem> {
    let at_position = |document, line, content: Vec<ItemContent>| {
        content.into_iter().map(move |content| ParsedItem {
            document,
            line,
            content,
        })
    };
    let mut lines = LineCounter {
        text,
        offset: 0,
        line: 1,
    };
    if let Some(items) = list_items(text) {
        // Most files are a single list. Without this shortcut, they would be parsed three times rather than
        // twice.
        return at_position(1, lines.line_of_next(0), parse_items(&items)).collect();
    }
    let mut parsed = Vec::new();
    let mut values = Deserializer::from_str(text).into_iter::<&RawValue>();
    for document in 1.. {
        let line = lines.line_of_next(values.byte_offset());
        match values.next() {
            None => break,
            Some(Ok(value)) => parsed.extend(at_position(document, line, parse_value(value.get()))),
            Some(Err(error)) => {
                let content = invalid_document(format!("is not valid JSON: {error}"));
                parsed.extend(at_position(document, error.line().max(1), vec![content]));
                break;
            }
        }
    }
    parsed
}

/// Parses one value in the file: a list or a single manifest.
fn parse_value(text: &str) -> Vec<ItemContent> {
    match list_items(text) {
        Some(items) => parse_items(&items),
        None => parse_manifest(text),
    }
}

/// Returns the items of a list, or `None` if the text is not a list.
fn list_items(text: &str) -> Option<Vec<&RawValue>> {
    let list = serde_json::from_str::<List<'_>>(text).ok()?;
    (list.kind == "List").then_some(list.items)
}

/// Parses the items of a list, in parallel if there are many.
fn parse_items(items: &[&RawValue]) -> Vec<ItemContent> {
    let item = |i, item: &&RawValue| {
        let content = parse_manifest(item.get()).into_iter();
        content
            .map(|content| prefix_with_item(i, content))
            .collect::<Vec<_>>()
    };
    parallel::map(items, MIN_PARALLEL, item)
        .into_iter()
        .flatten()
        .collect()
}

/// Parses a manifest from JSON text.
fn parse_manifest(text: &str) -> Vec<ItemContent> {
    let parse = || match k8s::parse_json(text) {
        Ok(parsed) => to_items(parsed),
        // The text is well-formed JSON, so either a number is too large or the nesting is too deep.
        Err(error) => vec![invalid_document(format!("is not valid JSON: {error}"))],
    };
    catch_unwind(parse).unwrap_or_else(|_| vec![invalid_document(PARSER_PANICKED)])
}

/// Counts the lines in a text, for a series of ascending offsets.
struct LineCounter<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
}

impl LineCounter<'_> {
    /// Returns the number, counted from 1, of the line with the first non-blank character at or after an
    /// offset.
    fn line_of_next(&mut self, offset: usize) -> usize {
        let rest = self.text.get(offset..).unwrap_or_default();
        let end = offset + (rest.len() - rest.trim_start().len());
        let passed = self.text.get(self.offset..end).unwrap_or_default();
        self.line += passed.matches('\n').count();
        self.offset = end;
        self.line
    }
}
