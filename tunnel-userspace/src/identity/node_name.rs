//! The rules for node names in certificates.

/// The maximum number of characters in a common name (X.520's `ub-common-name`, RFC 5280 appendix A.1).
const MAX_COMMON_NAME: usize = 64;

/// The error for a node name that can't be used in a certificate.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NameError {
    /// The name is empty.
    #[error("the node name must not be empty")]
    Empty,
    /// The name is longer than X.509 allows.
    #[error(
        "node name `{0}` has {length} characters; the common name of a certificate can have at \
        most {MAX_COMMON_NAME}", length = .0.len()
    )]
    TooLong(String),
    /// The name is not valid for a Kubernetes Node.
    #[error(
        "`{}` is not a valid Node name: use lower-case letters, digits, `-` and `.`; each part \
        between dots must begin and end with a letter or digit", .0.escape_debug()
    )]
    Malformed(String),
}

/// Checks that a name is a valid Node name (a DNS subdomain, RFC 1123) and fits in a certificate.
///
/// # Errors
///
/// Returns an error if the name is invalid or too long.
pub fn check_node_name(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if !is_subdomain(name) {
        return Err(NameError::Malformed(name.to_owned()));
    }
    // The name is ASCII, so its length in bytes equals its length in characters.
    if name.len() > MAX_COMMON_NAME {
        return Err(NameError::TooLong(name.to_owned()));
    }
    Ok(())
}

/// Returns true if `text` is a DNS subdomain (RFC 1123) as defined by Kubernetes, regardless of its length.
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.split('.').all(is_label)
}

fn is_label(label: &str) -> bool {
    let is_inner = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
    !label.is_empty()
        && label.bytes().all(is_inner)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_are_those_that_kubernetes_accepts() {
        for name in ["a", "edge-1", "7", "edge-1.site.example", "a--b"] {
            assert_eq!(check_node_name(name), Ok(()), "{name}");
        }
        for name in [
            "Edge", "-a", "a-", "a..b", ".a", "a.", "a_b", "a b", "ä", "a\n", "*",
        ] {
            let refused = check_node_name(name);
            assert!(
                matches!(refused, Err(NameError::Malformed(_))),
                "{name:?}: {refused:?}"
            );
        }
        assert_eq!(check_node_name(""), Err(NameError::Empty));
    }

    #[test]
    fn a_name_longer_than_a_common_name_is_refused_with_both_lengths() {
        let longest = "a".repeat(64);
        let longer = "a".repeat(65);

        let refused = check_node_name(&longer).expect_err("too long").to_string();

        assert_eq!(check_node_name(&longest), Ok(()));
        assert!(refused.contains("has 65 characters"), "{refused}");
        assert!(refused.contains("at most 64"), "{refused}");
    }
}
