use std::{fmt, path::Path};

use serde::{Deserialize, Serialize};

/// Something that a source was told and can't use.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// Where it was read: the file, or the API server.
    pub origin: String,
    /// The document in the file, counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub document: Option<usize>,
    /// The line in the file: where the text stops making sense, else where the document begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The object, where its kind and name could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What is wrong.
    pub reason: String,
    /// Whether only the field is left out, and the object used without it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignored: bool,
}

impl Problem {
    /// A problem of a whole file.
    pub(super) fn of_file(file: &Path, reason: impl Into<String>) -> Self {
        Self::of(file.display(), reason)
    }

    /// A problem of all that was read there.
    pub(super) fn of(origin: impl fmt::Display, reason: impl Into<String>) -> Self {
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

    /// What is the same of this problem while its object moves within the file.
    pub(super) fn without_place(&self) -> Self {
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

/// A kind that was met in a file and left alone.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnknownKind {
    /// The file.
    pub file: String,
    /// `apiVersion` and `kind`.
    pub kind: String,
}
