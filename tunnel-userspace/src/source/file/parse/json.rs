//! Parses a file of JSON.

use std::panic::catch_unwind;

use serde::Deserialize;
use serde_json::{Deserializer, value::RawValue};

use super::{BROKEN, Content, FEW, Parsed, contents, refused, within};
use crate::{k8s, parallel};

/// A list as `kubectl get -o json` prints it; the items stay as text.
#[derive(Deserialize)]
struct List<'a> {
    kind: &'a str,
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

/// Parses a file of JSON: consecutive values. The values after a syntax error are lost, since their
/// beginning can't be found.
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
        // The usual file, one list, is read twice in total; without this check it would be read three
        // times.
        return place(1, lines.of_next(0), of_items(&items)).collect();
    }
    let mut parsed = Vec::new();
    let mut values = Deserializer::from_str(text).into_iter::<&RawValue>();
    for document in 1.. {
        let line = lines.of_next(values.byte_offset());
        match values.next() {
            None => break,
            Some(Ok(value)) => parsed.extend(place(document, line, of_document(value.get()))),
            Some(Err(error)) => {
                let content = refused(format!("is not JSON: {error}"));
                parsed.extend(place(document, error.line().max(1), vec![content]));
                break;
            }
        }
    }
    parsed
}

/// Parses one value of a file.
fn of_document(text: &str) -> Vec<Content> {
    match list(text) {
        Some(items) => of_items(&items),
        None => of_one(text),
    }
}

/// Returns the items of a list; `None` if the text is no list.
fn list(text: &str) -> Option<Vec<&RawValue>> {
    let list = serde_json::from_str::<List<'_>>(text).ok()?;
    (list.kind == "List").then_some(list.items)
}

/// Parses the items of a list in several threads.
fn of_items(items: &[&RawValue]) -> Vec<Content> {
    let item = |i, item: &&RawValue| {
        let content = of_one(item.get()).into_iter();
        content
            .map(|content| within(i, content))
            .collect::<Vec<_>>()
    };
    parallel::each(items, FEW, item)
        .into_iter()
        .flatten()
        .collect()
}

/// Parses a manifest.
fn of_one(text: &str) -> Vec<Content> {
    let parse = || match k8s::parse_json(text) {
        Ok(parsed) => contents(parsed),
        // The text is well-formed JSON here, so this is a number that is too large, or too deep a
        // nesting.
        Err(error) => vec![refused(format!("is not JSON: {error}"))],
    };
    catch_unwind(parse).unwrap_or_else(|_| vec![refused(BROKEN)])
}

/// Counts lines up to increasing offsets.
struct Lines<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
}

impl Lines<'_> {
    /// Returns the line of the first non-blank character at or after an offset.
    fn of_next(&mut self, offset: usize) -> usize {
        let rest = self.text.get(offset..).unwrap_or_default();
        let end = offset + (rest.len() - rest.trim_start().len());
        let passed = self.text.get(self.offset..end).unwrap_or_default();
        self.line += passed.matches('\n').count();
        self.offset = end;
        self.line
    }
}
