//! The serial numbers of certificates.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The maximum number of hexadecimal digits. RFC 5280 section 4.1.2.2 allows 40.
const MAX_DIGITS: usize = 64;

/// The serial number of a certificate, in lower-case hexadecimal digits without leading zeros.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct SerialNumber(Box<str>);

impl SerialNumber {
    /// Creates a serial number from the bytes of the integer in a certificate.
    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self::of_digits(&digits)
    }

    /// Parses hexadecimal digits, as `culvert ca show` prints them. Upper-case digits, and colons between bytes, as
    /// OpenSSL prints them, are allowed, too. Returns `None` if the text is not a serial number.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let digits = text.replace(':', "").to_ascii_lowercase();
        let is_valid = (1..=MAX_DIGITS).contains(&digits.len())
            && digits.chars().all(|digit| digit.is_ascii_hexdigit());
        is_valid.then(|| Self::of_digits(&digits))
    }

    fn of_digits(digits: &str) -> Self {
        Self(digits.trim_start_matches('0').into())
    }
}

impl fmt::Display for SerialNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "0" } else { &self.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_number_is_the_same_however_it_is_written() {
        let serial = SerialNumber::of_bytes(&[0, 0x8a, 0x01, 0xf0]);

        assert_eq!(serial.to_string(), "8a01f0");
        for text in ["8a01f0", "8A01F0", "00:8a:01:f0", "8a:01:F0"] {
            assert_eq!(SerialNumber::parse(text), Some(serial.clone()), "{text}");
        }
        assert_eq!(SerialNumber::of_bytes(&[0]).to_string(), "0");
        for text in ["", ":", "8a01g0", "0x8a", "8a 01", &"1".repeat(65)] {
            assert_eq!(SerialNumber::parse(text), None, "{text}");
        }
    }
}
