//! The hello, which is the first stream of a session. In it, the gateway and the agent exchange their
//! releases and protocol versions.
//!
//! The gateway sends a line of JSON, and the agent replies with JSON. Unknown fields and features are
//! ignored, so that later releases can add more.

use bytes::{Bytes, BytesMut};
use futures_util::future::poll_fn;
use h2::{RecvStream, SendStream, client::SendRequest, server::SendResponse};
use http::{Method, Request, Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use super::{
    error_code::{code_of, refusal_response},
    http2,
    session_token::SessionToken,
};
use crate::identity::clock;

/// The newest protocol version that this release supports.
const NEWEST: u32 = 1;
/// The oldest protocol version that this release supports.
const OLDEST: u32 = 1;
/// The maximum length of a hello, in bytes.
const MAX_HELLO: usize = 16 << 10;
/// The maximum length of a string from the peer, in characters. Longer strings are truncated.
const MAX_TEXT: usize = 128;
/// The URI of the hello request.
const URI: &str = "https://gateway.culvert.dev/hello";
const PATH: &str = "/hello";

/// The feature of a gateway that renews sessions, and always confirms that.
const RENEWAL: &str = "renewal";

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// The gateway's hello.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct GatewayHello {
    /// The newest protocol version that the gateway supports.
    pub(super) protocol: u32,
    #[serde(default)]
    pub(super) release: String,
    #[serde(default)]
    pub(super) features: Vec<String>,
    /// The gateway's reason for refusing the session, which ends after the hello.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) refused: Option<String>,
    /// The time of the gateway's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) time: Option<Timestamp>,
}

/// The agent's reply to the gateway's hello.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct AgentHello {
    /// The protocol version to use in this session: the newest one that both ends support.
    pub(super) protocol: u32,
    #[serde(default)]
    pub(super) release: String,
    /// The name that the agent chose for this session.
    #[serde(default)]
    pub(super) session: String,
    /// The boot ID of the agent's node.
    #[serde(default)]
    pub(super) boot: String,
    /// The agent's allow-list. The gateway only displays it; the agent enforces it.
    #[serde(default)]
    pub(super) allow: Vec<String>,
    /// The session's secret.
    #[serde(default)]
    pub(super) token: SessionToken,
    /// The secrets of the agent's earlier sessions that this one renews: they last as long as the certificates that the ends
    /// have shown in this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) renews: Vec<SessionToken>,
    /// True if the session only renews others, and takes no streams.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(super) only_renews: bool,
    #[serde(default)]
    pub(super) features: Vec<String>,
    /// The time of the agent's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) time: Option<Timestamp>,
}

/// A line that the gateway sends after the agent's reply. Lines and fields that are unknown are ignored.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct GatewayLine {
    /// The secrets of the sessions that this one has renewed.
    #[serde(default)]
    pub(super) renewed: Vec<SessionToken>,
}

impl GatewayLine {
    /// Returns the bytes to send.
    pub(super) fn bytes(&self) -> Bytes {
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line.into()
    }
}

/// The rest of the gateway's hello, which stays open until the gateway drains.
#[derive(Debug)]
pub(super) struct GatewayLines {
    /// The difference between the gateway's clock and this machine's, if the gateway has sent its time.
    pub(super) clock_skew: Option<SignedDuration>,
    /// True if the gateway confirms which sessions it has renewed.
    pub(super) confirms_renewals: bool,
    body: RecvStream,
    unread: BytesMut,
}

impl GatewayLines {
    /// Waits for the next line. Returns `None` if there are no more, because the gateway drains or the session has ended. If
    /// the call is cancelled, the next one continues.
    pub(super) async fn next(&mut self) -> Option<GatewayLine> {
        loop {
            if let Some(line) = take_line(&mut self.unread) {
                return Some(serde_json::from_slice(&line).unwrap_or_default());
            }
            let bytes = poll_fn(|cx| self.body.poll_data(cx)).await?.ok()?;
            drop(self.body.flow_control().release_capacity(bytes.len()));
            if self.unread.len() + bytes.len() > MAX_HELLO {
                // Such a line is of a later release.
                self.unread.clear();
            } else {
                self.unread.extend_from_slice(&bytes);
            }
        }
    }
}

/// Removes the first line from the bytes, and returns it without its end.
fn take_line(bytes: &mut BytesMut) -> Option<BytesMut> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let mut line = bytes.split_to(end + 1);
    line.truncate(end);
    Some(line)
}

/// The error from a failed hello.
#[derive(Debug, thiserror::Error)]
pub(super) enum HelloError {
    #[error("the connection was lost during the hello")]
    Lost(#[from] h2::Error),
    #[error("the agent did not answer the hello")]
    NoResponse(#[from] http2::ResponseError),
    #[error("the hello is longer than {MAX_HELLO} bytes")]
    TooLong,
    #[error("the hello of the peer is not valid")]
    Malformed(#[from] serde_json::Error),
    #[error("the peer uses protocol version {0}; this release supports {OLDEST} to {NEWEST}")]
    Protocol(u32),
    #[error("the agent refused the hello with status {0}: {1}")]
    Refused(StatusCode, String),
    #[error("the gateway refused the session: {0}")]
    RefusedByGateway(String),
    #[error("the first stream of the session is not a hello")]
    NoHello,
    #[error("cannot build the request of the hello")]
    Request(#[from] http::Error),
}

/// Returns the protocol version for a session with a gateway that supports versions up to `newest`.
fn choose_version(newest: u32) -> Result<u32, HelloError> {
    if newest < OLDEST {
        return Err(HelloError::Protocol(newest));
    }
    Ok(newest.min(NEWEST))
}

/// Sends the gateway's hello. Returns the agent's reply and the request body, which stays open until the
/// gateway drains. `refused` is the reason if the gateway refuses the session.
pub(super) async fn send(
    sender: &mut SendRequest<Bytes>,
    refused: Option<String>,
) -> Result<(AgentHello, SendStream<Bytes>), HelloError> {
    let ask = GatewayHello {
        protocol: NEWEST,
        release: env!("CARGO_PKG_VERSION").to_owned(),
        features: vec![RENEWAL.to_owned()],
        refused,
        time: Some(clock::of_machine()),
    };
    let mut line = serde_json::to_vec(&ask)?;
    line.push(b'\n');
    let request = Request::post(URI).body(())?;
    let (response, mut body) = sender.send_request(request, false)?;
    body.send_data(line.into(), false)?;
    let response = http2::response(response).await?;
    let status = response.status();
    let text = read_hello(&mut response.into_body(), HelloEnd::Body).await?;
    if status != StatusCode::OK {
        let text = String::from_utf8_lossy(&text);
        return Err(HelloError::Refused(status, sanitise(&text)));
    }
    let answer = parse_agent_hello(&text)?;
    Ok((answer, body))
}

fn parse_agent_hello(text: &[u8]) -> Result<AgentHello, HelloError> {
    let mut answer: AgentHello = serde_json::from_slice(text)?;
    if !(OLDEST..=NEWEST).contains(&answer.protocol) {
        return Err(HelloError::Protocol(answer.protocol));
    }
    answer.release = sanitise(&answer.release);
    answer.session = sanitise(&answer.session);
    answer.boot = sanitise(&answer.boot);
    Ok(answer)
}

/// Replies to the gateway's hello, on the agent's side. Returns the gateway's further lines, which end when the gateway
/// drains.
pub(super) async fn respond(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    mut answer: AgentHello,
) -> Result<GatewayLines, HelloError> {
    if request.method() != Method::POST || request.uri().path() != PATH {
        respond.send_reset(code_of(Reason::ProtocolError));
        return Err(HelloError::NoHello);
    }
    let mut body = request.into_body();
    match read_gateway_hello(&mut body).await {
        Ok((protocol, ask)) => {
            answer.protocol = protocol;
            answer.time = Some(clock::of_machine());
            let response = Response::new(());
            let mut stream = respond.send_response(response, false)?;
            stream.send_data(serde_json::to_vec(&answer)?.into(), true)?;
            match ask.refused {
                Some(reason) => Err(HelloError::RefusedByGateway(sanitise(&reason))),
                None => Ok(GatewayLines {
                    clock_skew: ask.time.map(confirmed_skew),
                    confirms_renewals: ask.features.iter().any(|it| it == RENEWAL),
                    body,
                    unread: BytesMut::new(),
                }),
            }
        }
        Err(error) => {
            let refused = refusal_response(Reason::ProtocolError);
            let mut stream = respond.send_response(refused, false)?;
            stream.send_data(error.to_string().into(), true)?;
            Err(error)
        }
    }
}

/// Returns the difference between the clock of the other end, which has just sent its time, and this machine's.
pub(super) fn clock_skew(time: Timestamp) -> SignedDuration {
    time.duration_since(clock::of_machine())
}

/// Returns the difference between the clock of a gateway and this machine's. If it is small, this machine's clock is confirmed.
/// A gateway has no such confirmation from an agent, which sees its time first.
fn confirmed_skew(time: Timestamp) -> SignedDuration {
    clock::confirm(time);
    clock_skew(time)
}

/// Returns the protocol version to use, and the gateway's hello.
async fn read_gateway_hello(body: &mut RecvStream) -> Result<(u32, GatewayHello), HelloError> {
    let line = read_hello(body, HelloEnd::Line).await?;
    let ask: GatewayHello = serde_json::from_slice(&line)?;
    Ok((choose_version(ask.protocol)?, ask))
}

/// Parses `text` as the agent's hello, and as the gateway's. Used by the fuzz target.
pub(super) fn parse_both(text: &[u8]) {
    let _answer = parse_agent_hello(text);
    let _ask = serde_json::from_slice(text).map(|ask: GatewayHello| choose_version(ask.protocol));
}

/// The point at which a hello ends: the end of its first line, or the end of the body.
#[derive(Clone, Copy, Eq, PartialEq)]
enum HelloEnd {
    Line,
    Body,
}

async fn read_hello(body: &mut RecvStream, end_mark: HelloEnd) -> Result<BytesMut, HelloError> {
    let mut text = BytesMut::new();
    while let Some(bytes) = poll_fn(|cx| body.poll_data(cx)).await {
        let bytes = bytes?;
        body.flow_control().release_capacity(bytes.len())?;
        if text.len() + bytes.len() > MAX_HELLO {
            return Err(HelloError::TooLong);
        }
        text.extend_from_slice(&bytes);
        if end_mark == HelloEnd::Line
            && let Some(end) = text.iter().position(|byte| *byte == b'\n')
        {
            text.truncate(end);
            break;
        }
    }
    Ok(text)
}

/// Makes a string from the peer safe to log: removes control characters and truncates it.
fn sanitise(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .take(MAX_TEXT)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_that_both_support_is_used() {
        assert_eq!(choose_version(NEWEST).ok(), Some(NEWEST));
        assert_eq!(
            choose_version(NEWEST + 1).ok(),
            Some(NEWEST),
            "the next release"
        );
        assert_eq!(choose_version(u32::MAX).ok(), Some(NEWEST));
        let refused = choose_version(0).expect_err("too old").to_string();
        assert_eq!(
            refused,
            "the peer uses protocol version 0; this release supports 1 to 1"
        );
    }

    #[test]
    fn unknown_fields_of_a_later_release_are_ignored() {
        let text = br#"{"protocol":1,"release":"9.9","session":"a\u0007b","peers":[1,2],"features":["quic"]}"#;

        let answer = parse_agent_hello(text).expect("an answer");

        assert!(!answer.only_renews && answer.renews.is_empty());
        assert_eq!((answer.protocol, answer.release.as_str()), (1, "9.9"));
        assert_eq!(answer.session, "ab", "fit for a log");
        let ask: GatewayHello = serde_json::from_str(r#"{"protocol":7,"new":{}}"#).expect("an ask");
        assert_eq!(ask.protocol, 7);
    }

    #[test]
    fn garbage_is_an_error_and_never_a_panic() {
        for garbage in [
            &b""[..],
            b"{",
            b"null",
            b"[]",
            b"{\"protocol\":-1}",
            b"{\"protocol\":99999999999}",
            b"{\"protocol\":\"1\"}",
            b"\xff\xfe",
            b"{\"protocol\":2}",
            b"{\"protocol\":0}",
        ] {
            assert!(parse_agent_hello(garbage).is_err(), "{garbage:?}");
        }
    }

    #[test]
    fn lines_are_taken_one_by_one_and_unknown_ones_renew_nothing() {
        let known = GatewayLine {
            renewed: vec![SessionToken::random()],
        };
        let mut bytes = BytesMut::from(&b"{\"later\":1}\nnonsense\n"[..]);
        bytes.extend_from_slice(&known.bytes());
        bytes.extend_from_slice(b"{\"ren");

        let mut lines: Vec<GatewayLine> = Vec::new();
        while let Some(line) = take_line(&mut bytes) {
            lines.push(serde_json::from_slice(&line).unwrap_or_default());
        }

        assert_eq!(
            lines,
            [GatewayLine::default(), GatewayLine::default(), known]
        );
        assert_eq!(&bytes[..], b"{\"ren");
    }
}
