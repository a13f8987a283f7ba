//! The secret by which an agent proves in a new session that it also has an earlier one, which the new one renews.

use std::fmt;

use rustls::crypto::aws_lc_rs;
use serde::{Deserialize, Serialize};

/// A random secret that only the two ends of a session know. It is never logged.
#[derive(Clone, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub(super) struct SessionToken(String);

/// The length of a token, in bytes. It has twice as many hexadecimal digits.
const LENGTH: usize = 16;

impl SessionToken {
    /// Creates a token. If there is no randomness, the token is empty, and its session can't be renewed.
    pub(super) fn random() -> Self {
        let mut bytes = [0; LENGTH];
        let filled = aws_lc_rs::default_provider().secure_random.fill(&mut bytes);
        let digits = |()| format!("{:032x}", u128::from_be_bytes(bytes));
        Self(filled.map(digits).unwrap_or_default())
    }

    /// Returns true if both are the same token, and it has the length of a random one.
    pub(super) fn is(&self, other: &Self) -> bool {
        self.0.len() == 2 * LENGTH && self == other
    }
}

impl fmt::Debug for SessionToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionToken")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_only_itself_and_an_empty_or_short_one_is_nobodys() {
        let [one, other] = [SessionToken::random(), SessionToken::random()];
        assert!(one.is(&one.clone()) && !one.is(&other));
        for useless in ["", "0", "00"].map(|text| SessionToken(text.to_owned())) {
            assert!(!useless.is(&useless.clone()));
        }
        assert!(!format!("{one:?}").contains(&one.0));
    }
}
