//! Parses a JSON file.

use std::panic::catch_unwind;

use serde::Deserialize;
use serde_json::{Deserializer, value::RawValue};

use super::{BROKEN, Content, FEW, Parsed, contents, refused, within};
use crate::{k8s, parallel};

/// A list as `kubectl get -o json` prints it, with its items as text.
#[derive(Deserialize)]
struct List<'a> {
    kind: &'a str,
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

/// Parses a JSON file: a sequence of values. Values after a syntax error are not found.
pub(in crate::source::file) fn json(text: &str) -> Vec<Parsed> {
    let place = |document, line, content: Vec<Content>| {
        content.into_iter().map(move |content| Parsed {
            document,
            line,
            content,
        })
    };
    let mut lines = Lines {
        text,
        offset: 0,
        line: 1,
    };
    if let Some(items) = list(text) {
        // Most files are one list. Without this shortcut, they would be parsed three times instead of
        // twice.
        return place(1, lines.line_of_next(0), parse_items(&items)).collect();
    }
    let mut parsed = Vec::new();
    let mut values = Deserializer::from_str(text).into_iter::<&RawValue>();
    for document in 1.. {
        let line = lines.line_of_next(values.byte_offset());
        match values.next() {
            None => break,
            Some(Ok(value)) => parsed.extend(place(document, line, of_document(value.get()))),
            Some(Err(error)) => {
                let content = refused(format!("is not valid JSON: {error}"));
                parsed.extend(place(document, error.line().max(1), vec![content]));
                break;
            }
        }
    }
    parsed
}

/// Parses a value of the file: a list or one manifest.
fn of_document(text: &str) -> Vec<Content> {
    match list(text) {
        Some(items) => parse_items(&items),
        None => parse_manifest(text),
    }
}

/// Returns the items of a list; `None` if the text is not a list.
fn list(text: &str) -> Option<Vec<&RawValue>> {
    let list = serde_json::from_str::<List<'_>>(text).ok()?;
    (list.kind == "List").then_some(list.items)
}

/// Parses the items of a list, in parallel if there are many.
fn parse_items(items: &[&RawValue]) -> Vec<Content> {
    let item = |i, item: &&RawValue| {
        let content = parse_manifest(item.get()).into_iter();
        content
            .map(|content| within(i, content))
            .collect::<Vec<_>>()
    };
    parallel::map(items, FEW, item)
        .into_iter()
        .flatten()
        .collect()
}

/// Parses a manifest from its text.
fn parse_manifest(text: &str) -> Vec<Content> {
    let parse = || match k8s::parse_json(text) {
        Ok(parsed) => contents(parsed),
        // The text is well-formed, so a number is too large or the nesting is too deep.
        Err(error) => vec![refused(format!("is not valid JSON: {error}"))],
    };
    catch_unwind(parse).unwrap_or_else(|_| vec![refused(BROKEN)])
}

/// Counts the lines of a text up to ascending offsets.
struct Lines<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
}

impl Lines<'_> {
    /// Returns the line, from 1, of the first non-blank character at or after an offset.
    fn line_of_next(&mut self, offset: usize) -> usize {
        let rest = self.text.get(offset..).unwrap_or_default();
        let end = offset + (rest.len() - rest.trim_start().len());
        let passed = self.text.get(self.offset..end).unwrap_or_default();
        self.line += passed.matches('\n').count();
        self.offset = end;
        self.line
    }
}
