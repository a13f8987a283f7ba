use std::{fmt, path::Path};

use serde::{Deserialize, Serialize};

/// An error in an object, field or file of a source.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// The path of the file, or `API server`.
    pub origin: String,
    /// The number of the document in the file, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<usize>,
    /// The line of a syntax error, otherwise the first line of the document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The object, if its kind and name could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The path of the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// The error.
    pub reason: String,
    /// True if only the field is ignored, and the object is used without it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignored: bool,
}

impl Problem {
    /// Creates a problem of a complete file.
    pub(super) fn in_file(file: &Path, reason: impl Into<String>) -> Self {
        Self::new(file.display(), reason)
    }

    /// Creates a problem without document, object and field.
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

    /// Returns the problem without its position if the object is known: a problem stays the same when its
    /// object moves within the file.
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

/// A kind in a file that Culvert doesn't support.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnknownKind {
    /// The file.
    pub file: String,
    /// `apiVersion` and `kind`.
    pub kind: String,
}
