//! Splits Rust source into tokens, so that comments and strings are not mistaken for code.

/// A name or a punctuation mark, with its line number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    pub(super) line: usize,
}

impl Token<'_> {
    /// Returns true for a name or keyword, false for punctuation.
    pub(super) fn is_name(&self) -> bool {
        self.text.starts_with(is_name_start)
    }
}

/// Returns the names and punctuation marks in a file, without literals, lifetimes and comments.
pub(super) fn tokens(source: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    let mut rest = source;
    let mut line = 1;
    while !rest.is_empty() {
        let (length, is_token) = next_piece(rest);
        let (text, after) = rest.split_at(length);
        if is_token {
            found.push(Token { text, line });
        }
        line += text.matches('\n').count();
        rest = after;
    }
    found
}

/// Returns the length in bytes of the next piece of source, and true if it is a token.
fn next_piece(rest: &str) -> (usize, bool) {
    if rest.starts_with("//") {
        return (rest.find('\n').unwrap_or(rest.len()), false);
    }
    if rest.starts_with("/*") {
        return (block_comment_length(rest), false);
    }
    if let Some(length) = string_length(rest) {
        return (length, false);
    }
    if let Some(after) = rest.strip_prefix('\'') {
        return (1 + quoted_length(after), false);
    }
    if rest.starts_with("::") {
        return (2, true);
    }
    let name = prefix_length(rest, is_name_part);
    match rest.chars().next() {
        Some(first) if is_name_start(first) => (name, true),
        Some(first) if first.is_ascii_digit() => (name, false),
        Some(first) => (first.len_utf8(), !first.is_whitespace()),
        None => (rest.len(), false),
    }
}

/// Returns the length of a block comment, which may contain nested ones.
fn block_comment_length(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let tail = rest.as_bytes().get(at..).unwrap_or_default();
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Returns the length of the string literal at the start of `rest`: a plain, raw, byte or C string.
fn string_length(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        rest.strip_prefix(prefix)
            .is_some_and(|after| after.starts_with(['"', '#']))
    })?;
    let after = rest.get(prefix.len()..)?;
    let hashes = prefix_length(after, |character| character == '#');
    let body = after.get(hashes..)?.strip_prefix('"')?;
    let start = prefix.len() + hashes + 1;
    if prefix.ends_with('r') {
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(
            body.find(&end)
                .map_or(rest.len(), |at| start + at + end.len()),
        );
    }
    if hashes > 0 {
        return None;
    }
    let mut is_escaped = false;
    for (at, byte) in body.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return Some(start + at + 1),
            _ => {}
        }
    }
    Some(rest.len())
}

/// Returns the length of a character literal or lifetime, not counting its first quote.
fn quoted_length(after: &str) -> usize {
    let mut characters = after.chars();
    match (characters.next(), characters.next()) {
        // `'\''` ends at the quote after the escaped character.
        (Some('\\'), Some(escaped)) => {
            let start = 1 + escaped.len_utf8();
            let tail = after.get(start..).unwrap_or_default();
            tail.find('\'').map_or(after.len(), |at| start + at + 1)
        }
        (Some(character), Some('\'')) => character.len_utf8() + 1,
        (_, _) => prefix_length(after, is_name_part),
    }
}

/// Returns the length in bytes of the longest prefix in which every character satisfies `is_part`.
fn prefix_length(text: &str, is_part: impl Fn(char) -> bool) -> usize {
    text.find(|character| !is_part(character))
        .unwrap_or(text.len())
}

fn is_name_start(character: char) -> bool {
    character == '_' || character.is_alphabetic()
}

fn is_name_part(character: char) -> bool {
    character == '_' || character.is_alphanumeric()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        tokens(source).into_iter().map(|token| token.text).collect()
    }

    #[test]
    fn comments_literals_and_lifetimes_are_skipped() {
        let source = r##"a // kube::x
            /* aya /* nested */ still */ b "kube::\"y" r#"aya"::"# b'\'' '"' 'l c 1_u8 d"##;

        assert_eq!(texts(source), ["a", "b", "b", "c", "d"]);
    }

    #[test]
    fn names_and_punctuation_are_tokens() {
        let found = texts("use a::{b as c};#[d]").join(" ");
        assert_eq!(found, "use a :: { b as c } ; # [ d ]");
    }

    #[test]
    fn a_token_has_the_number_of_its_line() {
        let tokens = tokens("a\n/*\n*/ b \"\n\" c");

        let lines: Vec<usize> = tokens.iter().map(|token| token.line).collect();
        assert_eq!(lines, [1, 3, 4]);
    }
}
