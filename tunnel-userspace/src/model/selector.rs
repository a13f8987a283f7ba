//! Label selectors in the syntax used by kubectl: `a=b,c!=d,e in (x,y),f notin (z),g,!h` (apimachinery
//! `pkg/labels/selector.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

/// A label selector. An empty selector matches every object.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
struct Requirement {
    key: String,
    /// The accepted values; `None` if every value is accepted.
    values: Option<BTreeSet<String>>,
    /// True if the requirement is negated. A negated requirement also matches if the label is missing.
    negated: bool,
}

/// The error for text that is not a valid label selector.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "`{requirement}` is not a label requirement; valid forms are `a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a` and `!a`"
)]
pub struct SelectorError {
    requirement: String,
}

impl Selector {
    /// Returns the keys of all labels in the selector.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.requirements
            .iter()
            .map(|requirement| &*requirement.key)
    }

    /// Returns true if the selector matches an object with the given labels.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| {
            let found = labels.get(&requirement.key);
            let values = requirement.values.as_ref();
            let has = |value| values.is_none_or(|values| values.contains(value));
            found.is_some_and(has) != requirement.negated
        })
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let requirements = split(text).into_iter().map(Requirement::parse);
        Ok(Self {
            requirements: requirements.collect::<Result<_, _>>()?,
        })
    }
}

/// Splits a selector at the commas that are not inside parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    text.split(|letter: char| {
        match letter {
            '(' => depth += 1,
            // The requirement's parser rejects an unmatched parenthesis.
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        letter == ',' && depth == 0
    })
    .collect()
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, SelectorError> {
        let error = || SelectorError {
            requirement: text.trim().to_owned(),
        };
        let text = text.trim();
        let one_of = |list: &str| {
            let values = list.split(',').map(|value| value.trim().to_owned());
            Some(values.collect::<BTreeSet<_>>())
        };
        let (key, values, negated) = if let Some((key, value)) = text.split_once("!=") {
            (key, one_of(value), true)
        } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (key, one_of(value), false)
        } else if let Some(list) = text.strip_suffix(')') {
            let (head, list) = list.split_once('(').ok_or_else(error)?;
            let head = head.trim().rsplit_once(char::is_whitespace);
            match head.ok_or_else(error)? {
                (key, "in") => (key, one_of(list), false),
                (key, "notin") => (key, one_of(list), true),
                _ => return Err(error()),
            }
        } else if let Some(key) = text.strip_prefix('!') {
            (key, None, true)
        } else {
            (text, None, false)
        };
        let key = key.trim();
        let is_valid = is_key(key) && values.iter().flatten().all(|value| is_value(value));
        is_valid
            .then(|| Self {
                key: key.to_owned(),
                values,
                negated,
            })
            .ok_or_else(error)
    }
}

/// Returns true if the text is a valid label key: a name of at most 63 characters, optionally preceded by a
/// DNS prefix and a slash.
fn is_key(key: &str) -> bool {
    let (prefix, name) = key.rsplit_once('/').unwrap_or(("x", key));
    let is_prefix = (1..=253).contains(&prefix.len())
        && prefix
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '.'));
    is_prefix && !name.is_empty() && is_value(name)
}

/// Returns true if the text is a valid label value: at most 63 letters, digits, `-`, `_` and `.`, beginning
/// and ending with a letter or digit.
fn is_value(value: &str) -> bool {
    let is_end = |letter: Option<char>| letter.is_none_or(|letter| letter.is_ascii_alphanumeric());
    value.len() <= 63
        && is_end(value.chars().next())
        && is_end(value.chars().next_back())
        && value
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(selector: &str, labels: &[(&str, &str)]) -> bool {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let selector: Selector = selector.parse().expect("a selector");
        selector.matches(&labels.iter().map(owned).collect())
    }

    #[test]
    fn each_kind_of_requirement_has_the_meaning_of_kubectl() {
        let edge = [("openyurt.io/is-edge-worker", "true"), ("site", "north")];

        assert!(matches("openyurt.io/is-edge-worker=true", &edge));
        assert!(matches("openyurt.io/is-edge-worker == true , site", &edge));
        assert!(!matches("openyurt.io/is-edge-worker=false", &edge));
        assert!(matches("site in (south, north)", &edge));
        assert!(!matches("site notin (south,north)", &edge));
        assert!(matches("zone notin (a)", &edge));
        assert!(matches("zone!=a", &edge));
        assert!(matches("!zone", &edge));
        assert!(!matches("!site", &edge));
        assert!(matches("", &edge));
        assert!(!matches("absent=", &edge));
    }

    #[test]
    fn an_invalid_selector_is_refused_with_its_invalid_requirement() {
        for bad in "a=b,,c=d|a b|a in b|a within (b)|=b|a=b c|-a|a=b=c".split('|') {
            let error = bad.parse::<Selector>().expect_err(bad).to_string();
            assert!(
                error.contains("is not a label requirement"),
                "{bad}: {error}"
            );
        }
    }
}
