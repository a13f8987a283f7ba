//! The words of comments and documents: a reader of the field finds standard terms only, and sentences that
//! begin with their subject or verb.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use crate::length;

/// Words and phrases that have a plainer one, and that one.
const BANNED: &[(&str, &str)] = &[
    ("anew", "again, or a verb with re-"),
    ("became of", "the outcome or result of"),
    ("canary", "probe"),
    ("comes of", "the outcome or result of"),
    ("hearsay", "report"),
    ("knock", "probe"),
    ("knocks", "probes"),
    ("ledger", "event queue"),
    ("news", "event, update"),
    ("tell", "publish, report, return, distinguish"),
    ("tells", "publishes, reports, returns, distinguishes"),
    ("told", "published, reported, returned, notified"),
];

/// Words that open a sentence only in a question.
const OPENINGS: &[&str] = &["How", "What", "Where", "Whether", "Who"];

/// A paragraph without code, and the number of its first line.
#[derive(Debug, Eq, PartialEq)]
struct Paragraph {
    line: usize,
    text: String,
}

/// Prints each banned word and opening in the comments of the sources, and in the documents.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut is_good = true;
    let mut read = |path: PathBuf, paragraphs: fn(&str) -> Vec<Paragraph>| -> Result<()> {
        for Paragraph { line, text } in paragraphs(&fs::read_to_string(&path)?) {
            for complaint in complaints(&text) {
                let path = path.strip_prefix(root).unwrap_or(&path).display();
                println!("{path}:{line}: {complaint}");
                is_good = false;
            }
        }
        Ok(())
    };
    for path in length::files(root, "rs")? {
        // Its own words are examples.
        if !path.ends_with(file!()) {
            read(path, comments)?;
        }
    }
    for path in length::files(root, "md")? {
        // The page that lists the words.
        if !path.ends_with("CONTRIBUTING.md") {
            read(path, prose)?;
        }
    }
    Ok(is_good)
}

fn complaints(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let banned = BANNED.iter().filter(|(word, _)| has(&lower, word));
    let banned = banned.map(|(word, plain)| format!("\"{word}\": write {plain}"));
    let opened = sentences(text).filter(|sentence| !sentence.ends_with('?'));
    let opened = opened.filter_map(|sentence| {
        let first = sentence.trim_start_matches('*');
        let first = first.split(|it: char| !it.is_alphabetic()).next()?;
        let is_banned = OPENINGS.contains(&first);
        is_banned.then(|| format!("\"{sentence}\": begin with the subject or the verb"))
    });
    banned.chain(opened).collect()
}

/// Returns true if a text in lower case has a word or phrase, by itself and not within another word.
fn has(text: &str, word: &str) -> bool {
    let is_edge = |next: Option<char>| next.is_none_or(|it| !it.is_alphanumeric() && it != '_');
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (
            text[..at].chars().next_back(),
            text[at + word.len()..].chars().next(),
        );
        is_edge(before) && is_edge(after)
    })
}

/// The sentences of a paragraph, each with its last mark.
fn sentences(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let end = [". ", "? ", "! ", ": "]
            .iter()
            .filter_map(|mark| rest.find(mark))
            .min();
        let (sentence, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
        rest = after;
        (!sentence.is_empty()).then_some(sentence)
    })
}

/// Returns the paragraphs of the comments in Rust source.
fn comments(source: &str) -> Vec<Paragraph> {
    let lines = source.lines().map(|line| {
        let text = line.trim_start().strip_prefix("//")?;
        Some(text.trim_start_matches(['/', '!']))
    });
    paragraphs(&lines.collect::<Vec<_>>())
}

/// Returns the paragraphs, items of lists and cells of tables of a page in Markdown.
fn prose(page: &str) -> Vec<Paragraph> {
    paragraphs(&page.lines().map(Some).collect::<Vec<_>>())
}

/// Joins lines up to one that is blank or begins something else; a line without text is none of a comment.
fn paragraphs(lines: &[Option<&str>]) -> Vec<Paragraph> {
    let (mut found, mut is_code, mut is_open) = (Vec::<Paragraph>::new(), false, false);
    for (at, line) in lines.iter().enumerate() {
        let line = line.map(str::trim).filter(|line| !line.is_empty());
        let Some(line) = line else {
            is_open = false;
            continue;
        };
        if line.starts_with("```") {
            is_code = !is_code;
            is_open = false;
            continue;
        }
        if is_code {
            continue;
        }
        // Headings are no sentences.
        if line.starts_with("# ") || line.starts_with("##") {
            is_open = false;
            continue;
        }
        let paragraph = |text: &str| Paragraph {
            line: at + 1,
            text: without_code(text),
        };
        if let Some(row) = line.strip_prefix('|') {
            found.extend(row.split(" | ").map(|cell| paragraph(cell.trim_start())));
            is_open = false;
            continue;
        }
        let item = line.strip_prefix("- ").or_else(|| line.strip_prefix("* "));
        match found.last_mut().filter(|_| is_open && item.is_none()) {
            Some(last) => {
                last.text.push(' ');
                last.text.push_str(&without_code(line));
            }
            None => found.push(paragraph(item.unwrap_or(line))),
        }
        is_open = true;
    }
    found
}

/// A line with a mark in the place of each piece of inline code.
fn without_code(line: &str) -> String {
    let parts = line.split('`').enumerate();
    parts
        .map(|(at, part)| if at % 2 == 0 { part } else { "`" })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_banned_word_is_found_by_itself_only() {
        assert_eq!(complaints("Made Anew.").len(), 1);
        assert_eq!(
            complaints("told, and heard"),
            ["\"told\": write published, reported, returned, notified"]
        );
        assert_eq!(complaints("Untold newspapers of an_anew.").len(), 0);
    }

    #[test]
    fn a_sentence_opens_with_such_a_word_only_as_a_question() {
        assert_eq!(
            complaints("Reads a file. What is missing is skipped.").len(),
            1
        );
        assert_eq!(
            complaints("Reads a file. Where is it? Somewhere else.").len(),
            0
        );
        assert_eq!(complaints("Whether a file exists").len(), 1);
    }

    #[test]
    fn comments_are_read_without_their_code() {
        let source = "//! The first,\n//! and `told`.\n\nlet told = \"told\"; // told\n/// ```\n/// told\n/// ```\n/// Last.";

        let found = comments(source);

        let texts: Vec<_> = found.iter().map(|it| (it.line, &*it.text)).collect();
        assert_eq!(texts, [(1, "The first, and `."), (8, "Last.")]);
    }

    #[test]
    fn each_cell_and_item_of_a_page_stands_by_itself() {
        let page = "# What works\n\nSome text\ngoes on.\n| How | Two |\n|---|---|\n- One\n  of two\n- What else";

        let texts: Vec<_> = prose(page).into_iter().map(|it| it.text).collect();

        assert_eq!(texts[0], "Some text goes on.");
        assert!(texts.iter().any(|text| text == "How"));
        assert_eq!(texts[texts.len() - 2..], ["One of two", "What else"]);
    }
}
