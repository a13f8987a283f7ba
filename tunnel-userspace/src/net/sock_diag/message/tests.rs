use netlink_packet_sock_diag::{SOCK_DESTROY, SOCK_DIAG_BY_FAMILY};
use proptest::prelude::*;

use super::*;

const SEQUENCE: u32 = 7;

/// The size of `struct nlmsghdr`.
const HEADER: usize = 16;
/// The offset of `id` in `struct inet_diag_msg`.
const FOUND_ID: usize = 4;
/// The size of `struct inet_diag_sockid`.
const ID: usize = 48;
/// The size of `struct inet_diag_msg`.
const FOUND: usize = 72;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// Returns a message, encoded as the kernel encodes it.
fn message(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).expect("a length");
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(0_u16.to_ne_bytes());
    message.extend(number.to_ne_bytes());
    message.extend(0_u32.to_ne_bytes());
    message.extend(body);
    message.resize(message.len().next_multiple_of(4), 0);
    message
}

/// Returns the body of a message about a socket (`struct inet_diag_msg`).
fn socket(family: u8) -> Vec<u8> {
    let mut body = vec![family, 1, 0, 0];
    body.extend(40_000_u16.to_be_bytes());
    body.extend(53_u16.to_be_bytes());
    for last in [1, 9] {
        body.extend([10, 0, 0, last]);
        body.extend([0; 12]);
    }
    body.extend(3_u32.to_ne_bytes());
    body.extend(0x11_u32.to_ne_bytes());
    body.extend(0x22_u32.to_ne_bytes());
    // The expiry time and the lengths of the two queues precede the user, and the inode follows the user.
    body.extend([0; 12]);
    body.extend(1000_u32.to_ne_bytes());
    body.extend([0; 4]);
    assert_eq!(body.len(), FOUND);
    body
}

/// Parses a message about one socket.
fn read(body: &[u8]) -> ListedSocket {
    let part = message(SOCK_DIAG_BY_FAMILY, SEQUENCE, body);
    let replies: Vec<_> = parse_replies(&part, SEQUENCE).collect();
    let [Some(Reply::Socket(found))] = replies.as_slice() else {
        panic!("{replies:?}");
    };
    found.clone()
}

#[test]
fn a_socket_is_read_with_its_addresses_cookie_and_user() {
    let at = |ip: [u8; 4], port| (Address::from_ip(ip.into()), Port::from_host(port));
    let found = read(&socket(AF_INET));
    assert_eq!(found.cookie(), 0x22_0000_0011);
    assert_eq!(found.peer(), at([10, 0, 0, 9], 53));
    assert_eq!(found.local(), at([10, 0, 0, 1], 40_000));
    assert_eq!(found.user(), 1000);

    let mut body = socket(AF_INET6);
    // The peer's address follows the ports and the local address.
    body[24..40].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 9]);
    assert_eq!(read(&body).peer(), at([10, 0, 0, 9], 53));
}

#[test]
fn the_reply_to_another_request_is_skipped_and_the_rest_is_parsed() {
    let mut part = message(SOCK_DIAG_BY_FAMILY, 1, &socket(AF_INET));
    part.extend(message(NLMSG_DONE, SEQUENCE, &0_i32.to_ne_bytes()));

    let replies: Vec<_> = parse_replies(&part, SEQUENCE).collect();

    let expected = [Reply::Other, Reply::Done];
    assert_eq!(replies, expected.map(Some));
}

#[test]
fn an_error_is_returned_and_an_acknowledgement_is_no_error() {
    let parse = |kind, code: i32| {
        let part = message(kind, SEQUENCE, &code.to_ne_bytes());
        parse_replies(&part, SEQUENCE).collect::<Vec<_>>()
    };

    let refused = [Some(Reply::Failed(Errno::EPERM))];
    assert_eq!(parse(NLMSG_ERROR, -1), refused);
    assert_eq!(parse(NLMSG_DONE, -1), refused);
    assert_eq!(parse(NLMSG_ERROR, 0), [Some(Reply::Done)]);
}

#[test]
fn a_request_to_end_a_socket_has_the_listed_identity() {
    let body = socket(AF_INET6);

    let end = end(Protocol::UDP, &read(&body), 1);

    assert_eq!(end.len(), HEADER + 8 + ID);
    assert_eq!(end[4..6], SOCK_DESTROY.to_ne_bytes());
    assert_eq!(end[HEADER..HEADER + 2], [AF_INET6, 17]);
    assert_eq!(end[HEADER + 8..], body[FOUND_ID..FOUND_ID + ID]);
}

proptest! {
    #[test]
    fn any_bytes_can_be_parsed(part in proptest::collection::vec(any::<u8>(), 0..512)) {
        let count = parse_replies(&part, 0).count();
        prop_assert!(count <= part.len());
    }

    #[test]
    fn a_truncated_message_is_malformed(length in 0_usize..200) {
        let complete = message(SOCK_DIAG_BY_FAMILY, SEQUENCE, &socket(AF_INET));
        let cut = complete.get(..length.min(complete.len())).unwrap_or_default();
        for reply in parse_replies(cut, SEQUENCE) {
            prop_assert!(reply.is_none() || length >= complete.len());
        }
    }
}
