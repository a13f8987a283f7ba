//! Serialises a transport protocol as its name.

use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};
use tunnel_common::addr::Protocol;

const PROTOCOLS: [Protocol; 3] = [Protocol::TCP, Protocol::UDP, Protocol::SCTP];

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde calls it with a reference"
)]
pub(super) fn serialize<S: Serializer>(
    protocol: &Protocol,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(protocol)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Protocol, D::Error> {
    let name = String::deserialize(deserializer)?;
    PROTOCOLS
        .into_iter()
        .find(|protocol| protocol.to_string() == name)
        .ok_or_else(|| D::Error::custom(format!("{name:?} is not TCP, UDP or SCTP")))
}
