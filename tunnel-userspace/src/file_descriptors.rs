//! The limit on open files (`RLIMIT_NOFILE`). Connections of others, whose number Culvert can't control, leave a
//! part of the file descriptors to Culvert itself: to the sources, the maps, netlink and the admin sockets.
//!
//! The kernel always returns the lowest free number as a new file descriptor (open(2)), so a descriptor's number shows
//! how many descriptors the process has at least. Culvert closes a connection of others if its number is in the
//! reserved part. No counter is needed, and descriptors are never missed.

use std::{
    io,
    os::fd::{AsFd, AsRawFd as _},
};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The number of descriptors that connections of others leave to Culvert. An idle daemon with a gateway and an
/// ingress has about 125 files open, which have low numbers, and each of its three listeners for HTTP up to 64
/// connections.
pub(crate) const RESERVED: u64 = 512;

/// A descriptor's place among those that the process may have.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Part {
    /// The connection may stay open.
    Clients,
    /// The connection is one of the first in the reserved part. It may stay open if another one is closed.
    Margin,
    /// The connection must be closed.
    Reserved,
}

/// Raises the soft limit on open files to the hard limit, and returns the resulting limit.
///
/// # Errors
///
/// Returns an error if the kernel refuses to change the limit.
pub fn raise_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// Returns the maximum number of open files, or the highest possible number if there is no limit.
pub(crate) fn limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Returns how many of the descriptors within a limit are reserved: 512, but at most half of them.
pub(crate) const fn reserved(limit: u64) -> u64 {
    if limit / 2 < RESERVED {
        limit / 2
    } else {
        RESERVED
    }
}

/// Returns the maximum number of connections that clients of the ingress may have, and also the maximum number that
/// agents may have: three quarters of the descriptors that are not reserved. Clients and agents therefore leave each
/// other at least a quarter.
pub(crate) fn share() -> usize {
    let limit = limit();
    usize::try_from((limit - reserved(limit)) / 4 * 3).unwrap_or(usize::MAX)
}

/// Returns the part that the descriptor of a new connection belongs to.
pub(crate) fn part_of(connection: &impl AsFd) -> Part {
    let number = connection.as_fd().as_raw_fd();
    part(u64::try_from(number).unwrap_or(0), limit())
}

/// Returns true if connections of pods and agents may have the descriptor of this new connection. The last sixteenth
/// of those that are not reserved is for the ingress's clients on the host.
pub(crate) fn is_for_all(connection: &impl AsFd) -> bool {
    let number = connection.as_fd().as_raw_fd();
    in_part_for_all(u64::try_from(number).unwrap_or(0), limit())
}

const fn in_part_for_all(number: u64, limit: u64) -> bool {
    let for_host = (limit - reserved(limit)) / 16;
    matches!(part(number.saturating_add(for_host), limit), Part::Clients)
}

const fn part(number: u64, limit: u64) -> Part {
    // The rest of the reserved part are low numbers, which an idle daemon has in use.
    let reserved = reserved(limit) / 8 * 5;
    if number < limit - reserved {
        Part::Clients
    } else if number < limit - reserved / 4 * 3 {
        Part::Margin
    } else {
        Part::Reserved
    }
}

/// Returns true if an operation failed because the process, or the whole system, has too many open files.
pub(crate) fn is_exhausted(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    number.is_some_and(|number| [libc::EMFILE, libc::ENFILE].contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_no_descriptor_of_the_reserved_part() {
        for (limit, clients, margin) in [
            (1024, 704, 784),
            (1_048_576, 1_048_256, 1_048_336),
            (256, 176, 196),
            (u64::MAX, u64::MAX - 320, u64::MAX - 240),
        ] {
            assert_eq!(part(clients - 1, limit), Part::Clients, "{limit}");
            assert_eq!(part(clients, limit), Part::Margin, "{limit}");
            assert_eq!(part(margin - 1, limit), Part::Margin, "{limit}");
            assert_eq!(part(margin, limit), Part::Reserved, "{limit}");
        }
        assert_eq!(part(0, 0), Part::Reserved);
    }

    #[test]
    fn the_last_sixteenth_is_for_the_host() {
        for (limit, end) in [(1024, 704 - 32), (1_048_576, 1_048_256 - 65_504), (0, 0)] {
            assert!(limit == 0 || in_part_for_all(end - 1, limit), "{limit}");
            assert!(!in_part_for_all(end, limit), "{limit}");
        }
    }

    #[test]
    fn a_failure_for_lack_of_descriptors_is_known() {
        assert!(is_exhausted(&io::Error::from_raw_os_error(libc::EMFILE)));
        assert!(!is_exhausted(&io::Error::from_raw_os_error(libc::ENOMEM)));
        assert!(!is_exhausted(&io::Error::other("other")));
    }
}
