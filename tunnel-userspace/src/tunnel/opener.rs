//! Opening streams to a node, wherever its session is held.

use std::{fmt, pin::Pin, sync::Arc};

use bytes::Bytes;
use tokio::{net::TcpStream, runtime::Handle};
use tunnel_common::reason::Reason;

use super::{copy::Stream, link::Traffic};
use crate::model::Target;

/// A future of a trait object.
pub(super) type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Opens streams to the targets of a node. A session of this gateway does; a link to another gateway
/// that holds the node's session can.
pub(super) trait Opener: fmt::Debug + Send + Sync {
    /// Whether it takes new streams: it has not ended, and the agent has not said that it will.
    fn is_open(&self) -> bool;

    /// Takes one of the slots for streams; false if all are taken.
    fn take_slot(&self) -> bool;

    /// Gives a slot back.
    fn free_slot(&self);

    /// Counts what the streams carry.
    fn traffic(&self) -> &Traffic;

    /// Runs the streams.
    fn runtime(&self) -> &Handle;

    /// Ends when the streams have to, with the reason.
    fn stopped(&self) -> Pending<'static, Reason>;

    /// Opens a stream to the target, with the client's first bytes, and waits for the answer.
    fn open<'a>(
        &'a self,
        target: &'a Target,
        first: Bytes,
        client: &'a TcpStream,
    ) -> Pending<'a, Result<Stream, Reason>>;
}

/// A slot for one stream, free again when this is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    opener: Arc<dyn Opener>,
}

impl Permit {
    /// Takes a slot, if one is free.
    pub(super) fn take(opener: Arc<dyn Opener>) -> Option<Self> {
        // Lazily: a permit that is dropped gives its slot back.
        opener.take_slot().then(|| Self { opener })
    }

    /// The opener that the slot is of.
    pub(super) fn opener(&self) -> &dyn Opener {
        &*self.opener
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.opener.free_slot();
    }
}
