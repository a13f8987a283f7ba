//! Parses the query of `/explain`.

use std::net::SocketAddr;

use tunnel_common::addr::Protocol;

use crate::explain::Question;

/// Parses the parameters `from=`, `to=`, `protocol=` and `by=`.
///
/// # Errors
///
/// Returns an error that names the parameter if it is missing, unknown or invalid.
pub(super) fn parse(query: &str) -> Result<Question, String> {
    let (mut from, mut to, mut protocol, mut link) = (None, None, Protocol::TCP, None);
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let address = |name: &str, text: &str| -> Result<SocketAddr, String> {
            let parsed = text.parse();
            parsed.map_err(|_invalid| format!("{name}: `{text}` is not an IP address and a port"))
        };
        match parameter.split_once('=') {
            Some(("from", text)) => from = Some(address("from", text)?),
            Some(("to", text)) => to = Some(address("to", text)?),
            Some(("protocol", "TCP")) => protocol = Protocol::TCP,
            Some(("protocol", "UDP")) => protocol = Protocol::UDP,
            Some(("protocol", "SCTP")) => protocol = Protocol::SCTP,
            Some(("protocol", text)) => {
                return Err(format!("protocol: `{text}` is none of TCP, UDP and SCTP"));
            }
            Some(("by", name)) => link = Some(name.to_owned()),
            Some((name, _)) => return Err(format!("unknown parameter `{name}`")),
            None => return Err(format!("`{parameter}` is not a parameter")),
        }
    }
    let from = from.ok_or("the parameter `from` is missing")?;
    let to = to.ok_or("the parameter `to` is missing")?;
    if from.is_ipv4() != to.is_ipv4() {
        return Err(format!("{from} and {to} belong to different IP families"));
    }
    Ok(Question {
        from,
        to,
        protocol,
        link,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_has_two_ends_of_one_family() {
        let question =
            parse("from=203.0.113.9:0&to=198.51.100.1:80&protocol=UDP&by=eth0").expect("good");
        assert_eq!(question.to.port(), 80);
        assert_eq!(question.protocol, Protocol::UDP);
        assert_eq!(question.link.as_deref(), Some("eth0"));
        for (query, word) in [
            ("to=198.51.100.1:80", "from"),
            ("from=203.0.113.9:1", "to"),
            ("from=203.0.113.9:1&to=[::1]:80", "families"),
            ("from=web&to=198.51.100.1:80", "`web`"),
            ("from=203.0.113.9:1&to=198.51.100.1", "198.51.100.1"),
            ("protocol=ICMP", "ICMP"),
            ("with=1", "with"),
            ("from", "from"),
        ] {
            let error = parse(query).expect_err("bad");
            assert!(error.contains(word), "{query}: {error}");
        }
    }
}
