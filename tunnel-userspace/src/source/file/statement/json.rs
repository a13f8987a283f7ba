//! What a file of JSON says.

use serde::Deserialize;
use serde_json::{Deserializer, value::RawValue};

use super::{FEW, Said, Statement, guarded, refused, said_of, within};
use crate::{k8s, parallel};

/// A list as `kubectl get -o json` prints it, with its items as they stand in the text.
#[derive(Deserialize)]
struct List<'a> {
    kind: &'a str,
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

/// Reads a file of JSON: values one after the other. What comes after one that can't be parsed
/// can't be found.
pub(in crate::source::file) fn of_json(text: &str) -> Vec<Statement> {
    if let Some(items) = list(text) {
        // The usual file: one list, which is then read twice, not three times.
        let line = Lines::of(text).of_next(0);
        let place = |said| Statement {
            document: 1,
            line,
            said,
        };
        return of_items(&items).into_iter().map(place).collect();
    }
    let mut statements = Vec::new();
    let mut values = Deserializer::from_str(text).into_iter::<&RawValue>();
    let mut lines = Lines::of(text);
    for document in 1.. {
        let line = lines.of_next(values.byte_offset());
        match values.next() {
            None => break,
            Some(Ok(value)) => {
                let place = |said| Statement {
                    document,
                    line,
                    said,
                };
                statements.extend(of_document(value.get()).into_iter().map(place));
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

/// What one value of a file says.
fn of_document(text: &str) -> Vec<Said> {
    match list(text) {
        Some(items) => of_items(&items),
        None => of_one(text),
    }
}

/// The items of a list; nothing if it is none.
fn list(text: &str) -> Option<Vec<&RawValue>> {
    let list = serde_json::from_str::<List<'_>>(text).ok()?;
    (list.kind == "List").then_some(list.items)
}

/// What the items of a list say, which are read by several threads.
fn of_items(items: &[&RawValue]) -> Vec<Said> {
    let item = |i, item: &&RawValue| {
        let said = of_one(item.get()).into_iter();
        said.map(|said| within(i, said)).collect::<Vec<_>>()
    };
    parallel::each(items, FEW, item)
        .into_iter()
        .flatten()
        .collect()
}

/// What a manifest says.
fn of_one(text: &str) -> Vec<Said> {
    guarded(|| match k8s::parse_json(text) {
        Ok(parsed) => said_of(parsed),
        // Its text is well-formed, or it would not be here: a number too large, or too deep a nest.
        Err(error) => vec![refused(format!("is not JSON: {error}"))],
    })
}

/// Counts lines up to growing offsets.
struct Lines<'a> {
    text: &'a str,
    offset: usize,
    line: usize,
}

impl<'a> Lines<'a> {
    const fn of(text: &'a str) -> Self {
        Self {
            text,
            offset: 0,
            line: 1,
        }
    }

    /// The line of the first thing at or after an offset.
    fn of_next(&mut self, offset: usize) -> usize {
        let rest = self.text.get(offset..).unwrap_or_default();
        let end = offset + (rest.len() - rest.trim_start().len());
        let passed = self.text.get(self.offset..end).unwrap_or_default();
        self.line += passed.matches('\n').count();
        self.offset = end;
        self.line
    }
}
