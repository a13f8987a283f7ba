//! Checks comments, documentation, messages and names for banned words, and the first word of each sentence.

use std::{fs, path::Path};

use anyhow::Result;

use crate::workspace;

/// Banned words and phrases, each with its replacement.
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

/// Words with which only a question may begin.
const OPENINGS: &[&str] = &["How", "What", "Where", "Whether", "Who"];

/// A paragraph without its code, and the line number at which it begins.
#[derive(Debug, Eq, PartialEq)]
struct Paragraph {
    line: usize,
    text: String,
}

/// Prints each banned word in comments, string literals, names and documentation, and each sentence in
/// comments and documentation that begins with a banned word.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut is_good = true;
    let mut report = |path: &Path, paragraphs: Vec<Paragraph>, find: fn(&str) -> Vec<String>| {
        let path = path.strip_prefix(root).unwrap_or(path).display();
        for Paragraph { line, text } in paragraphs {
            for complaint in find(&text) {
                println!("{path}:{line}: {complaint}");
                is_good = false;
            }
        }
    };
    for path in workspace::list_files(root, "rs")? {
        // This file contains the banned words.
        if !path.ends_with(file!()) {
            let source = fs::read_to_string(&path)?;
            report(&path, comments(&source), complaints);
            report(&path, code(&source), banned);
        }
    }
    for path in workspace::list_files(root, "md")? {
        // This page lists the banned words.
        if !path.ends_with("CONTRIBUTING.md") {
            report(&path, prose(&fs::read_to_string(&path)?), complaints);
        }
    }
    Ok(is_good)
}

fn complaints(text: &str) -> Vec<String> {
    let opened = sentences(text).filter(|sentence| !sentence.ends_with('?'));
    let opened = opened.filter_map(|sentence| {
        let first = sentence.trim_start_matches('*');
        let first = first.split(|it: char| !it.is_alphabetic()).next()?;
        let is_banned = OPENINGS.contains(&first);
        is_banned.then(|| format!("\"{sentence}\": begin with the subject or the verb"))
    });
    banned(text).into_iter().chain(opened).collect()
}

fn banned(text: &str) -> Vec<String> {
    let text = text.to_lowercase();
    let banned = BANNED.iter().filter(|(word, _)| has(&text, word));
    let banned = banned.map(|(word, plain)| format!("\"{word}\": write {plain}"));
    banned.collect()
}

/// Returns true if a lower-case text contains a word or phrase, other than as part of a longer word.
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

/// Returns the sentences in a paragraph, each with its punctuation mark.
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

/// Returns the paragraphs, list items and table cells on a Markdown page.
fn prose(page: &str) -> Vec<Paragraph> {
    paragraphs(&page.lines().map(Some).collect::<Vec<_>>())
}

/// Returns the lines of code in Rust source, with the words of each name separated by spaces, so that names
/// and string literals are checked alike.
fn code(source: &str) -> Vec<Paragraph> {
    let mut found = Vec::new();
    for (at, line) in source.lines().enumerate() {
        let is_comment = line.trim_start().starts_with("//");
        let code = if is_comment { "" } else { line };
        let mut text = String::new();
        let mut is_lower = false;
        for letter in code.chars() {
            let is_inner = letter.is_alphanumeric() || letter == '\'';
            if letter.is_uppercase() && is_lower {
                text.push(' ');
            }
            text.push(if is_inner { letter } else { ' ' });
            is_lower = letter.is_lowercase();
        }
        let words: Vec<_> = text.split_whitespace().collect();
        if !words.is_empty() {
            found.push(Paragraph {
                line: at + 1,
                text: words.join(" "),
            });
        }
    }
    found
}

/// Joins lines into paragraphs. `None` is a line of code, which ends a paragraph just as an empty line does.
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
        // Headings are not sentences.
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

/// Replaces each piece of inline code in a line with a backtick.
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
    fn a_banned_word_is_not_found_within_another_word() {
        assert_eq!(complaints("Made Anew.").len(), 1);
        assert_eq!(
            complaints("told, and heard"),
            ["\"told\": write published, reported, returned, notified"]
        );
        assert_eq!(complaints("Untold newspapers of an_anew.").len(), 0);
    }

    #[test]
    fn only_a_question_may_begin_with_a_question_word() {
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
    fn names_and_literals_are_checked_word_by_word() {
        let source = "// told\nfn tell_all(toldYou: Told) {\n    panic!(\"canary {told}\")\n}\nlet untold = 1;";

        let found: Vec<_> = code(source)
            .into_iter()
            .map(|it| (it.line, banned(&it.text).len()))
            .filter(|(_, complaints)| *complaints > 0)
            .collect();

        // `tell` and `told` on the first line, `canary` and `told` on the second.
        assert_eq!(found, [(2, 2), (3, 2)]);
    }

    #[test]
    fn each_table_cell_and_list_item_is_a_separate_paragraph() {
        let page = "# What works\n\nSome text\ngoes on.\n| How | Two |\n|---|---|\n- One\n  of two\n- What else";

        let texts: Vec<_> = prose(page).into_iter().map(|it| it.text).collect();

        assert_eq!(texts[0], "Some text goes on.");
        assert!(texts.iter().any(|text| text == "How"));
        assert_eq!(texts[texts.len() - 2..], ["One of two", "What else"]);
    }
}
