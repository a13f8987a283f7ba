use std::{fmt, path::Path};

use serde::{Deserialize, Serialize};

/// A problem with an object, a field or a file from a source.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// The path of the file, or `API server`.
    pub origin: String,
    /// The document's number within the file, counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<usize>,
    /// The line of the syntax error if there is one; otherwise the first line of the document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The kind and name of the object, if they could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The path of the field, if the problem is with a single field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// A description of the problem.
    pub reason: String,
    /// True if only the field is ignored and the object is used without it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignored: bool,
}

impl Problem {
    /// Creates a problem with a whole file.
    pub(super) fn in_file(file: &Path, reason: impl Into<String>) -> Self {
        Self::new(file.display(), reason)
    }

    /// Creates a problem that names no document, object or field.
    pub(super) fn new(origin: impl fmt::Display, reason: impl Into<String>) -> Self {
        Self {
            origin: origin.to_string(),
            document: None,
            line: None,
            object: None,
            field: None,
            reason: reason.into(),
            ignored: false,
        }
    }

    /// Returns the problem without its position in the file if the object is known, so that moving the object
    /// within the file does not turn it into a new problem.
    pub(super) fn without_position(&self) -> Self {
        let (document, line) = match self.object {
            Some(_) => (None, None),
            None => (self.document, self.line),
        };
        Self {
            document,
            line,
            ..self.clone()
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.origin)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(document) = self.document {
            write!(f, ": document {document}")?;
        }
        for part in [&self.object, &self.field].into_iter().flatten() {
            write!(f, ": {part}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// An unsupported kind in a file.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnknownKind {
    /// The path of the file.
    pub file: String,
    /// The `apiVersion` and `kind`, separated by a space.
    pub kind: String,
}
