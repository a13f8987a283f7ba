//! The wire encoding of a [`Reason`]: an error code in `RST_STREAM` frames, and a header in refusals.

use http::{HeaderMap, HeaderValue, Response, StatusCode};
use tunnel_common::reason::Reason;

/// The first error code in Culvert's range. A reason's code is this plus [`Reason::number`]. RFC 9113 section
/// 7 assigns the codes up to 0xd.
const CODE_BASE: u32 = 0xC000_0000;
/// The bits that all codes in Culvert's range have in common.
const CODE_MASK: u32 = 0xFFFF_FF00;

/// The response header that carries the label of the reason for a refusal.
pub(super) const REASON_HEADER: &str = "culvert-reason";

/// One side of a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum StreamSide {
    /// The client's side, at the ingress.
    Client,
    /// The target's side, at the agent.
    Target,
}

impl StreamSide {
    /// Returns the reason to report if this side has reset the stream without giving a reason.
    pub(super) const fn reset_reason(self) -> Reason {
        match self {
            Self::Client => Reason::ClientReset,
            Self::Target => Reason::TargetReset,
        }
    }

    pub(super) const fn other(self) -> Self {
        match self {
            Self::Client => Self::Target,
            Self::Target => Self::Client,
        }
    }
}

/// Returns the error code for a reason.
pub(super) fn code_of(reason: Reason) -> h2::Reason {
    let number = reason.number();
    number.map_or(h2::Reason::PROTOCOL_ERROR, |number| {
        (CODE_BASE | number).into()
    })
}

/// Returns the reason for an error code sent by the side `from`. A code outside Culvert's range maps to the
/// closest reason.
pub(super) fn reason_of_code(code: h2::Reason, from: StreamSide) -> Reason {
    let number = u32::from(code);
    if number & CODE_MASK == CODE_BASE {
        return match Reason::from_number(number & !CODE_MASK) {
            Some(reason) if may_end_a_stream(reason) => reason,
            Some(_) | None => Reason::ProtocolError,
        };
    }
    match code {
        h2::Reason::CANCEL | h2::Reason::CONNECT_ERROR => from.reset_reason(),
        h2::Reason::REFUSED_STREAM => Reason::StreamLimit,
        // h2 resets streams with these codes when their session ends.
        h2::Reason::NO_ERROR | h2::Reason::INTERNAL_ERROR => Reason::AgentConnectionLost,
        _ => Reason::ProtocolError,
    }
}

/// Returns the reason for a stream error. `from` is the remote side.
pub(super) fn reason_of_error(error: &h2::Error, from: StreamSide) -> Reason {
    match error.reason() {
        Some(code) if error.is_reset() => {
            if error.is_remote() || error.is_library() {
                reason_of_code(code, from)
            } else {
                reason_of_code(code, from.other())
            }
        }
        Some(_) | None => Reason::AgentConnectionLost,
    }
}

/// Returns true if a stream can end with this reason.
const fn may_end_a_stream(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::SessionRevoked | Reason::StreamIdle | Reason::DescriptorLimit | Reason::MemoryLimit
    ) || reason.index() >= Reason::StreamCompleted.index()
        && reason.index() <= Reason::ProtocolError.index()
}

/// Builds the response that refuses a stream for the given reason.
pub(super) fn refusal_response(reason: Reason) -> Response<()> {
    let mut response = Response::new(());
    *response.status_mut() = status_of(reason);
    let label = HeaderValue::from_static(reason.label());
    response.headers_mut().insert(REASON_HEADER, label);
    response
}

/// Returns the HTTP status for a refusal, following the conventions of HTTP proxies. Peers give precedence to
/// the header.
fn status_of(reason: Reason) -> StatusCode {
    STATUSES
        .into_iter()
        .find(|(of, _)| *of == reason)
        .map_or(StatusCode::SERVICE_UNAVAILABLE, |(_, status)| status)
}

/// The HTTP status for each reason. Reasons that are not listed use the first status. A refusal without the
/// header maps to the first reason listed with its status.
const STATUSES: [(Reason, StatusCode); 6] = [
    (Reason::DialLimit, StatusCode::SERVICE_UNAVAILABLE),
    (Reason::TargetDenied, StatusCode::FORBIDDEN),
    (Reason::DialRefused, StatusCode::BAD_GATEWAY),
    (Reason::DialUnreachable, StatusCode::BAD_GATEWAY),
    (Reason::DialTimedOut, StatusCode::GATEWAY_TIMEOUT),
    (Reason::ProtocolError, StatusCode::BAD_REQUEST),
];

/// Returns the reason for a refusal, taken from its header, or from its status if the header is missing or
/// its label is unknown.
pub(super) fn reason_of_refusal(status: StatusCode, headers: &HeaderMap) -> Reason {
    let label = headers.get(REASON_HEADER).map(HeaderValue::as_bytes);
    let named = Reason::ALL
        .into_iter()
        .filter(|reason| may_end_a_stream(*reason))
        .find(|reason| Some(reason.label().as_bytes()) == label);
    let by_status = || STATUSES.into_iter().find(|(_, of)| *of == status);
    named
        .or_else(|| by_status().map(|(reason, _)| reason))
        .unwrap_or(Reason::ProtocolError)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream_reasons() -> impl Iterator<Item = Reason> {
        Reason::ALL.into_iter().filter(|r| may_end_a_stream(*r))
    }

    #[test]
    fn every_reason_of_a_stream_comes_back_from_its_code() {
        assert_eq!(stream_reasons().count(), 19);
        for reason in stream_reasons() {
            assert_eq!(reason_of_code(code_of(reason), StreamSide::Client), reason);
            assert_eq!(reason_of_code(code_of(reason), StreamSide::Target), reason);
        }
        // Peers that run other releases depend on these numbers.
        assert_eq!(u32::from(code_of(Reason::StreamCompleted)), 0xC000_0017);
        assert_eq!(u32::from(code_of(Reason::ProtocolError)), 0xC000_0025);
    }

    #[test]
    fn every_code_maps_to_a_reason_of_a_stream() {
        let around = CODE_BASE - 1..CODE_BASE + 300;
        for number in (0..=20).chain(around).chain([u32::MAX, 1 << 31]) {
            let reason = reason_of_code(number.into(), StreamSide::Target);
            assert!(may_end_a_stream(reason), "{number:#x} is {reason:?}");
        }
    }

    #[test]
    fn an_http2_code_maps_to_the_closest_reason() {
        use h2::Reason as Code;
        let of_no_stream = code_of(Reason::Translated);
        for (code, from, reason) in [
            (Code::CANCEL, StreamSide::Client, Reason::ClientReset),
            (Code::CANCEL, StreamSide::Target, Reason::TargetReset),
            (
                Code::REFUSED_STREAM,
                StreamSide::Target,
                Reason::StreamLimit,
            ),
            (
                Code::ENHANCE_YOUR_CALM,
                StreamSide::Target,
                Reason::ProtocolError,
            ),
            (of_no_stream, StreamSide::Target, Reason::ProtocolError),
        ] {
            assert_eq!(reason_of_code(code, from), reason, "{code:?}");
        }
    }

    #[test]
    fn the_reason_of_a_refusal_is_from_its_header_or_else_its_status() {
        for reason in stream_reasons() {
            let response = refusal_response(reason);
            assert_eq!(
                reason_of_refusal(response.status(), response.headers()),
                reason
            );
        }
        let mut unknown = HeaderMap::new();
        unknown.insert(REASON_HEADER, HeaderValue::from_static("of_tomorrow"));
        assert_eq!(
            reason_of_refusal(StatusCode::FORBIDDEN, &unknown),
            Reason::TargetDenied
        );
        assert_eq!(
            reason_of_refusal(StatusCode::IM_A_TEAPOT, &HeaderMap::new()),
            Reason::ProtocolError
        );
    }
}
