//! Names of maps and programs: the names in the object, of the pins and in the documents.

/// Hash: front key to the index of its record.
pub const SVC: &str = "svc";
/// Array: records of fronts.
pub const FRONT: &str = "front";
/// Array: places in sets.
pub const SLOT: &str = "slot";
/// Array: ranges of clients that may use a front.
pub const SOURCE: &str = "source";
/// Array: backends.
pub const BE: &str = "be";
/// Array: how many open sockets remember each backend.
pub const CONNS: &str = "conns";
/// Socket storage: what a socket remembers.
pub const ORIGIN: &str = "origin";
/// LRU hash: older translations of unconnected sockets.
pub const OVERFLOW: &str = "overflow";
/// Per-CPU array: counters by reason.
pub const COUNT: &str = "count";
/// Array: what was sent on and refused, by service port.
pub const TALLY: &str = "tally";
/// LRU hash: which backend a client keeps.
pub const AFFINITY: &str = "affinity";
/// Hash: address and port of an edge node to the index of its record.
pub const STEER: &str = "steer";
/// Array: addresses and ports of edge nodes that are steered.
pub const STEERED: &str = "steered";
/// Array: the cookie of the host's network namespace; the families that are routed to the ingress.
pub const HOST: &str = "host";

/// Every map of the object, in the order in which they are created.
pub const MAPS: [&str; 14] = [
    SVC, FRONT, SLOT, SOURCE, BE, CONNS, ORIGIN, OVERFLOW, COUNT, TALLY, AFFINITY, STEER, STEERED,
    HOST,
];

/// The maps that are taken over from every older layout, since what they hold means the same in all
/// of them: what hangs on sockets, which can't be converted, the counts that go down when those
/// close, and what steering addresses stand for. A layout that changes one of them otherwise than in
/// its reserve takes it out of this list; `origin` and `conns` may never go.
pub const LASTING: [&str; 6] = [ORIGIN, OVERFLOW, CONNS, STEER, STEERED, HOST];

/// The program at tc of the uplinks: nothing from outside reaches a steering prefix.
pub const GUARD: &str = "guard";

/// The program at the close of a socket.
pub const SOCK_RELEASE: &str = "sock_release";

/// Every program of a cgroup, named as its hook, in the order in which they are attached:
/// what brings a VIP back stands before what takes it away.
pub const PROGRAMS: [&str; 9] = [
    SOCK_RELEASE,
    "getpeername4",
    "getpeername6",
    "recvmsg4",
    "recvmsg6",
    "connect4",
    "connect6",
    "sendmsg4",
    "sendmsg6",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_keeps_every_map_name_whole() {
        // BPF_OBJ_NAME_LEN is 16, with the final zero.
        assert!(MAPS.iter().all(|name| name.len() <= 15));
    }
}
