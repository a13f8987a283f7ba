//! Splits a YAML file into its documents, so that a syntax error in one does not affect the others.

/// A document in a YAML file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Document<'a> {
    /// The document's number within the file, counted from 1. Documents without content are not counted.
    pub(super) number: usize,
    /// The line of the file on which the text begins, counted from 1.
    pub(super) line: usize,
    /// The text after the preceding document marker.
    pub(super) text: &'a str,
}

/// Splits a file at its document markers, the lines that begin with `---` or `...`. YAML does not allow such
/// lines within scalars, so there is no need to parse the text (YAML 1.2.2, section 9.1.2).
pub(super) fn split(text: &str) -> Vec<Document<'_>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents: Vec<Document<'_>> = Vec::new();
    let mut push_document = |start: usize, end: usize, line: usize| {
        if let Some(text) = text.get(start..end).filter(|text| has_content(text)) {
            let number = documents.len() + 1;
            documents.push(Document { number, line, text });
        }
    };

    let mut offset = 0_usize;
    let mut start = (0, 1);
    for (line, content) in (1..).zip(text.split_inclusive('\n')) {
        if is_marker(content) {
            push_document(start.0, offset, start.1);
            start = (offset + "---".len(), line);
        }
        offset += content.len();
    }
    push_document(start.0, offset, start.1);
    documents
}

fn is_marker(line: &str) -> bool {
    let rest = line
        .strip_prefix("---")
        .or_else(|| line.strip_prefix("..."));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']))
}

/// Returns true if a document contains anything besides blank lines, comments and directives.
fn has_content(text: &str) -> bool {
    text.lines().any(is_content)
}

fn is_content(line: &str) -> bool {
    let trimmed = line.trim_start();
    !(trimmed.is_empty() || trimmed.starts_with('#') || line.starts_with('%'))
}

impl Document<'_> {
    /// Returns the line of the document on which its content begins, counted from 0.
    pub(super) fn first_line(&self) -> usize {
        self.text.lines().position(is_content).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(file: &str) -> Vec<&str> {
        split(file)
            .into_iter()
            .map(|document| document.text.trim())
            .collect()
    }

    #[test]
    fn a_marker_is_three_dashes_before_a_blank_or_the_end_of_the_line() {
        assert_eq!(
            texts("a: 1\n---\nb: 2\n---  \nc: 3\n---\r\nd: 4\n---"),
            ["a: 1", "b: 2", "c: 3", "d: 4"]
        );
        assert_eq!(
            texts("---a: 1\n ---\n--- {b: 2}\n"),
            ["---a: 1\n ---", "{b: 2}"]
        );
    }

    #[test]
    fn documents_without_content_are_not_counted() {
        let file = "# header\n\n---\na: 1\n---\n---\n# only a comment\n---\nb: 2\n";

        let documents = split(file);

        assert_eq!(texts(file), ["a: 1", "b: 2"]);
        assert_eq!(
            documents.iter().map(|d| d.number).collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(documents.iter().map(|d| d.line).collect::<Vec<_>>(), [3, 8]);
    }

    #[test]
    fn directives_and_end_markers_belong_to_no_document() {
        assert_eq!(
            texts("\u{feff}%YAML 1.2\n---\na: 1\n...\n# done\n---\nb: 2\n"),
            ["a: 1", "b: 2"]
        );
    }

    #[test]
    fn indented_dashes_in_a_block_scalar_are_not_a_marker() {
        assert_eq!(texts("a: |\n  ---\n  text\n").len(), 1);
    }

    proptest! {
        #[test]
        fn documents_joined_by_markers_are_split_again(
            documents in proptest::collection::vec("[a-z]{1,8}: [a-z0-9 .-]{0,20}x\n( {2}[a-z-]{1,9}\n){0,3}", 0..8)
        ) {
            let file = documents.join("---\n");
            let found = split(&file);

            let expected: Vec<&str> = documents.iter().map(|text| text.trim()).collect();
            prop_assert_eq!(texts(&file), expected);
            for document in found {
                let line = file.lines().nth(document.line - 1).unwrap_or_default();
                prop_assert!(line == "---" || document.number == 1);
            }
        }

        #[test]
        fn any_text_can_be_split(text in "(---|\\.\\.\\.|[ a#%\r\n-]|\\PC){0,60}") {
            for document in split(&text) {
                prop_assert!(text.contains(document.text));
            }
        }
    }
}
