//! A client of the node.

use super::fixture::{
    ACK, Ends, Node, Refusal, SYN, endpoint, text_of, through_egress, through_ingress,
};
use crate::{addr::Protocol, flow::Endpoint};

/// A client outside, and the protocol that it speaks.
pub(super) struct Client<'a> {
    pub(super) node: &'a Node,
    pub(super) at: Endpoint,
    pub(super) frontend: Endpoint,
    pub(super) protocol: Protocol,
    /// True if the backends are on another node.
    is_remote: bool,
}

impl<'a> Client<'a> {
    pub(super) fn new(node: &'a Node, at: &str, frontend: &str, is_remote: bool) -> Self {
        Self {
            node,
            at: endpoint(at),
            frontend: endpoint(frontend),
            protocol: node.frontends[0].key.protocol,
            is_remote,
        }
    }

    /// Sends a packet to the frontend, and returns its ends when it reaches the backend.
    pub(super) fn send(&self, flags: u8) -> Result<Ends, Refusal> {
        let ends = (self.at, self.frontend);
        let ends = through_ingress(self.node, ends, self.protocol, flags)?;
        if self.is_remote {
            through_egress(self.node, ends, self.protocol, flags)
        } else {
            Ok(ends)
        }
    }

    /// Sends a reply to a packet that has reached the backend, and checks that it reaches the client from the frontend.
    pub(super) fn expect_reply(&self, (seen_client, backend): Ends, flags: u8) {
        let ends = (backend, seen_client);
        let ends = if self.is_remote {
            through_ingress(self.node, ends, self.protocol, flags).expect("a reply")
        } else {
            ends
        };
        let ends = through_egress(self.node, ends, self.protocol, flags).expect("a reply");
        assert_eq!(
            [ends.0, ends.1].map(text_of),
            [self.frontend, self.at].map(text_of)
        );
    }

    /// Exchanges the packets of a handshake, and returns the client and the backend as they see each other.
    pub(super) fn connect(&self) -> Ends {
        let ends = self.send(SYN).expect("a backend");
        self.expect_reply(ends, SYN | ACK);
        assert_eq!(self.send(ACK), Ok(ends));
        ends
    }
}
