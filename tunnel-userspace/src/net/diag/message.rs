//! The messages of sock_diag(7): `linux/inet_diag.h` and `linux/sock_diag.h`. Pure.

use nix::errno::Errno;
use tunnel_common::addr::{Address, Port, Protocol};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// The families of sockets; v4-mapped ones are among those of IPv6.
pub(super) const FAMILIES: [u8; 2] = [AF_INET, AF_INET6];

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of `struct inet_diag_msg`, and where its `id` is.
const FOUND: usize = 72;
const FOUND_ID: usize = 4;
/// Bytes of `struct inet_diag_sockid`.
const ID: usize = 48;

/// States of a socket (`net/tcp_states.h`) as bits: a connected UDP socket is "established".
const ESTABLISHED: u32 = 1 << 1;
const SYN_SENT: u32 = 1 << 2;
const FIN_WAIT1: u32 = 1 << 4;
const FIN_WAIT2: u32 = 1 << 5;
const CLOSE: u32 = 1 << 7;
const CLOSE_WAIT: u32 = 1 << 8;
const LISTEN: u32 = 1 << 10;

/// Where a socket is found again: its family, ports, addresses, device and cookie, as the kernel
/// told them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    family: u8,
    id: [u8; ID],
}

impl Place {
    /// One of IPv6 that is connected there, with a cookie.
    #[cfg(test)]
    pub(crate) fn of(address: Address, port: Port, cookie: u64) -> Self {
        let mut id = [0; ID];
        id[2..4].copy_from_slice(&port.to_network().to_ne_bytes());
        id[20..36].copy_from_slice(&address.octets());
        let words = [cookie & 0xffff_ffff, cookie >> 32];
        for (place, word) in id[40..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&u32::try_from(word).unwrap_or_default().to_ne_bytes());
        }
        Self {
            family: AF_INET6,
            id,
        }
    }

    /// Where it is bound to.
    #[must_use]
    pub fn own(&self) -> (Address, Port) {
        self.end(0, 4)
    }

    /// Where it is connected to.
    #[must_use]
    pub fn peer(&self) -> (Address, Port) {
        self.end(2, 20)
    }

    /// One end, whose port and address are there in the id.
    fn end(&self, port: usize, address: usize) -> (Address, Port) {
        let word = |word: usize| {
            let at = address.saturating_add(word.saturating_mul(4));
            u32::from_ne_bytes(array(&self.id, at).unwrap_or_default())
        };
        let address = if self.family == AF_INET {
            Address::from_v4_word(word(0))
        } else {
            Address::from_words([word(0), word(1), word(2), word(3)])
        };
        let port = u16::from_ne_bytes(array(&self.id, port).unwrap_or_default());
        (address, Port::from_network(port))
    }

    /// Its cookie.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        let word = |at: usize| u32::from_ne_bytes(array(&self.id, at).unwrap_or_default());
        u64::from(word(44)) << 32 | u64::from(word(40))
    }
}

/// Whether a socket of a protocol that is in this state (`net/tcp_states.h`) is connected, and may
/// wait for something.
#[must_use]
pub fn is_connected(protocol: Protocol, state: u32) -> bool {
    1_u32
        .checked_shl(state)
        .is_some_and(|bit| Stage::Connected.states(protocol) & bit != 0)
}

/// What sockets are up to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    /// They are connected.
    Connected,
    /// They wait for whoever comes: they listen, or are bound and not connected.
    Open,
}

impl Stage {
    /// The states of such sockets, as bits.
    fn states(self, protocol: Protocol) -> u32 {
        let is_tcp = protocol == Protocol::TCP;
        match self {
            Self::Connected if is_tcp => {
                ESTABLISHED | SYN_SENT | FIN_WAIT1 | FIN_WAIT2 | CLOSE_WAIT
            }
            Self::Connected => ESTABLISHED,
            Self::Open if is_tcp => LISTEN,
            Self::Open => CLOSE,
        }
    }
}

/// A question.
pub(super) struct Ask {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
}

impl Ask {
    /// Every socket of a family and protocol that is at a stage.
    pub(super) fn list(family: u8, protocol: Protocol, stage: Stage) -> Self {
        let place = Place {
            family,
            id: [0; ID],
        };
        Self {
            kind: SOCK_DIAG_BY_FAMILY,
            flags: NLM_F_REQUEST | NLM_F_DUMP,
            body: request(protocol, stage.states(protocol), &place),
        }
    }

    /// The end of one socket.
    pub(super) fn end(protocol: Protocol, place: &Place) -> Self {
        Self {
            kind: SOCK_DESTROY,
            flags: NLM_F_REQUEST | NLM_F_ACK,
            body: request(protocol, u32::MAX, place),
        }
    }

    /// The whole message, with its number.
    pub(super) fn message(&self, number: u32) -> Vec<u8> {
        let length = u32::try_from(HEADER.saturating_add(self.body.len())).unwrap_or(u32::MAX);
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(self.kind.to_ne_bytes());
        message.extend(self.flags.to_ne_bytes());
        message.extend(number.to_ne_bytes());
        // From this socket, whatever its number is.
        message.extend(0_u32.to_ne_bytes());
        message.extend(&self.body);
        message
    }
}

/// `struct inet_diag_req_v2`.
fn request(protocol: Protocol, states: u32, place: &Place) -> Vec<u8> {
    let mut request = vec![place.family, protocol.number(), 0, 0];
    request.extend(states.to_ne_bytes());
    request.extend(place.id);
    request
}

/// One message of the kernel.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Answer {
    /// A socket.
    Socket(Place),
    /// That was all, or it was done.
    Done,
    /// It failed.
    Failed(Errno),
    /// Something else, or the answer to another question.
    Other,
}

/// The messages of one part of an answer. Nothing in the place of one that can't be read, which is
/// the last.
pub(super) fn answers(part: &[u8], number: u32) -> impl Iterator<Item = Option<Answer>> {
    let mut rest = Some(part);
    // Each message has at least its header, so there are no more than the part has bytes.
    std::iter::from_fn(move || {
        let part = rest.take().filter(|part| !part.is_empty())?;
        let length = array(part, 0).map(u32::from_ne_bytes);
        let length = length.and_then(|length| usize::try_from(length).ok());
        let message = length
            .filter(|length| *length >= HEADER)
            .and_then(|length| part.get(..length));
        let Some(message) = message else {
            return Some(None);
        };
        rest = Some(part.get(aligned(message.len())..).unwrap_or_default());
        Some(answer(message, number))
    })
}

fn answer(message: &[u8], number: u32) -> Option<Answer> {
    let kind = u16::from_ne_bytes(array(message, 4)?);
    if u32::from_ne_bytes(array(message, 8)?) != number {
        return Some(Answer::Other);
    }
    let body = message.get(HEADER..)?;
    Some(match kind {
        // What ends a list bears its error, where it broke off.
        NLMSG_ERROR | NLMSG_DONE => match array(body, 0).map(i32::from_ne_bytes) {
            Some(code) if code < 0 => Answer::Failed(Errno::from_raw(code.wrapping_neg())),
            Some(_) => Answer::Done,
            None if kind == NLMSG_DONE => Answer::Done,
            None => return None,
        },
        SOCK_DIAG_BY_FAMILY => Answer::Socket(found(body)?),
        _ => Answer::Other,
    })
}

/// A socket of a list.
fn found(body: &[u8]) -> Option<Place> {
    let body = body.get(..FOUND)?;
    Some(Place {
        family: *body.first()?,
        id: array(body, FOUND_ID)?,
    })
}

const fn aligned(length: usize) -> usize {
    length.saturating_add(3) & !3
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests;
