//! The network interface on which an accepted connection arrived.
#![expect(
    unsafe_code,
    reason = "neither std nor nix reads IP_PKTOPTIONS and IPV6_2292PKTOPTIONS"
)]

use std::{
    ffi::c_int,
    io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd as _},
};

use nix::sys::socket::{
    setsockopt,
    sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo},
};

/// The `IP_PKTOPTIONS` socket option (`include/uapi/linux/in.h`).
const IP_PKTOPTIONS: c_int = 9;
/// The `IPV6_2292PKTOPTIONS` socket option (`include/uapi/linux/in6.h`).
const IPV6_2292PKTOPTIONS: c_int = 6;
/// The size of a `cmsghdr`, in bytes.
const HEADER: usize = size_of::<libc::cmsghdr>();

/// Makes the kernel record the incoming interface of each connection that this listener accepts.
pub(super) fn enable(listener: &impl AsFd, is_v6: bool) -> io::Result<()> {
    // Also set on an IPv6 listener, since it accepts IPv4 connections, too.
    setsockopt(listener, Ipv4PacketInfo, &true)?;
    if is_v6 {
        setsockopt(listener, Ipv6RecvPacketInfo, &true)?;
    }
    Ok(())
}

/// Returns the index of the interface on which a connection arrived. `local` is the connection's local
/// address.
pub(super) fn index(socket: &impl AsFd, local: SocketAddr) -> io::Result<u32> {
    let (level, option) = if local.ip().to_canonical().is_ipv4() {
        (libc::SOL_IP, IP_PKTOPTIONS)
    } else {
        (libc::SOL_IPV6, IPV6_2292PKTOPTIONS)
    };
    let mut options = [0_u8; 512];
    let mut length = libc::socklen_t::try_from(options.len()).map_err(io::Error::other)?;
    // SAFETY: the pointers point to a buffer and to its length, which both outlive the call; the kernel
    // writes no more than that length, and every byte is a valid `u8`.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            options.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    let written = usize::try_from(length).map_err(io::Error::other)?;
    options
        .get(..written)
        .and_then(parse_index)
        .ok_or_else(|| io::Error::other("the kernel returned no interface index"))
}

/// Returns the interface index found in a sequence of control messages (cmsg(3)).
fn parse_index(mut messages: &[u8]) -> Option<u32> {
    // The loop terminates, since `get(HEADER..length)` returns `None` for a message shorter than its header.
    while let Some((header, _)) = messages.split_at_checked(HEADER) {
        let length = usize::from_ne_bytes(*header.first_chunk()?);
        let (level, kind) = header.get(size_of::<usize>()..)?.split_at_checked(4)?;
        let level = c_int::from_ne_bytes(*level.first_chunk()?);
        let kind = c_int::from_ne_bytes(*kind.first_chunk()?);
        let data = messages.get(HEADER..length)?;
        let index = match (level, kind) {
            // `struct in_pktinfo` begins with the interface index.
            (libc::SOL_IP, libc::IP_PKTINFO) => data.first_chunk(),
            // `struct in6_pktinfo` has the interface index after the address.
            (libc::SOL_IPV6, libc::IPV6_PKTINFO | libc::IPV6_2292PKTINFO) => {
                data.get(16..)?.first_chunk()
            }
            _ => None,
        };
        if let Some(index) = index {
            return Some(u32::from_ne_bytes(*index));
        }
        messages = messages.get(length.next_multiple_of(align_of::<libc::cmsghdr>())..)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use nix::net::if_::if_nametoindex;
    use socket2::{Domain, Socket, Type};

    use super::*;

    fn assert_arrives_over_loopback(listen: &str, dial: &str) {
        let address: SocketAddr = listen.parse().expect("an address");
        let listener =
            Socket::new(Domain::for_address(address), Type::STREAM, None).expect("a socket");
        if address.is_ipv6() {
            listener.set_only_v6(false).expect("dual stack");
        }
        listener.bind(&address.into()).expect("bound");
        enable(&listener, address.is_ipv6()).expect("remembered");
        listener.listen(8).expect("listening");
        let listener: std::net::TcpListener = listener.into();
        let port = listener.local_addr().expect("an address").port();

        let _client = TcpStream::connect(format!("{dial}:{port}")).expect("connected");
        let (accepted, _) = listener.accept().expect("accepted");

        let local = accepted.local_addr().expect("an address");
        let loopback = if_nametoindex("lo").expect("an index");
        assert_eq!(index(&accepted, local).expect("known"), loopback);
    }

    #[test]
    fn a_connect_over_loopback_came_by_loopback_in_each_family() {
        assert_arrives_over_loopback("127.0.0.1:0", "127.0.0.1");
        assert_arrives_over_loopback("[::1]:0", "[::1]");
        assert_arrives_over_loopback("[::]:0", "127.0.0.1");
        assert_arrives_over_loopback("[::]:0", "[::1]");
    }

    #[test]
    fn truncated_messages_and_wrong_lengths_have_no_index() {
        let message = |length: usize, level: c_int, kind: c_int, data: &[u8]| {
            let mut bytes = length.to_ne_bytes().to_vec();
            bytes.extend(level.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(data);
            bytes
        };
        let info = |length| message(length, libc::SOL_IP, libc::IP_PKTINFO, &7_u32.to_ne_bytes());

        assert_eq!(parse_index(&info(HEADER + 4)), Some(7));
        for length in [0, 1, HEADER, HEADER + 3, HEADER + 5, usize::MAX] {
            assert_eq!(parse_index(&info(length)), None, "{length}");
        }
        assert_eq!(parse_index(&[]), None);
        let complete = info(HEADER + 4);
        for cut in 0..complete.len() {
            assert_eq!(parse_index(&complete[..cut]), None, "{cut}");
        }
        let mut two = message(HEADER + 8, libc::SOL_IP, libc::IP_TTL, &[0; 8]);
        two.extend(info(HEADER + 4));
        assert_eq!(parse_index(&two), Some(7));
    }
}
