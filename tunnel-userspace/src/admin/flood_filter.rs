//! A socket filter that ignores new connections from clients that flood a listener. The kernel then drops their
//! packets before they fill the listener's queue, so that other clients can still connect.

use std::{
    collections::{BTreeMap, HashMap},
    future, io,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use socket2::{SockFilter, SockRef};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, sleep_until},
};
use tracing::warn;

use super::client::{Client, ClientFinder, ROOT};

/// The time over which a client's connections are counted.
const WINDOW: Duration = Duration::from_millis(100);
/// The number of connections within this time that make a client flood the listener.
const FLOOD: u32 = 200;
/// The time for which such a client is ignored.
const IGNORED_FOR: Duration = Duration::from_secs(1);
/// The maximum number of clients that are ignored at a time.
const MAX_IGNORED: usize = 32;
/// The maximum number of clients whose connections are counted at a time.
const MAX_COUNTED: usize = 4096;
/// The minimum interval between two log lines about the same listener.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The filter of one listener.
#[derive(Debug, Default)]
pub(super) struct FloodFilter {
    clients: Mutex<Clients>,
    finder: ClientFinder,
}

/// The clients of a listener.
#[derive(Debug, Default)]
struct Clients {
    window_start: Option<Instant>,
    /// The number of connections in the current window, by client.
    counts: HashMap<Client, u32>,
    /// The clients that are ignored, each with the time until which it is.
    ignored: BTreeMap<Client, Instant>,
    next_log: Option<Instant>,
}

impl FloodFilter {
    /// Accepts a connection. Meanwhile, keeps the filter of the listener up to date. The filter can't recognise the
    /// connections of this node's users, so those of a user that is ignored are closed as soon as they are accepted.
    pub(super) async fn accept(
        &self,
        name: &'static str,
        listener: &TcpListener,
    ) -> io::Result<(TcpStream, Client)> {
        loop {
            let expiry = self.with_clients(|clients| clients.ignored.values().min().copied());
            let expired = async {
                match expiry {
                    Some(at) => sleep_until(at).await,
                    None => future::pending().await,
                }
            };
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, peer) = accepted?;
                    let client = match stream.local_addr() {
                        Ok(own) => self.finder.find(own, peer),
                        Err(_) => Client::of_address(peer.ip()),
                    };
                    // The kubelet runs as root.
                    if client == ROOT {
                        return Ok((stream, client));
                    }
                    self.count(name, listener, client);
                    let is_ignored = self.with_clients(|clients| clients.ignored.contains_key(&client));
                    if !is_ignored || matches!(client, Client::Address(_)) {
                        return Ok((stream, client));
                    }
                    // A reset leaves the connection in no other state. If it fails, the connection is closed.
                    drop(SockRef::from(&stream).set_linger(Some(Duration::ZERO)));
                }
                () = expired => {
                    self.with_clients(|clients| clients.expire(Instant::now()));
                    self.attach(name, listener);
                }
            }
        }
    }

    fn count(&self, name: &'static str, listener: &TcpListener, client: Client) {
        let now = Instant::now();
        let (is_new, is_logged) = self.with_clients(|clients| {
            let is_new = clients.count(client, now);
            let is_due = is_new && clients.next_log.is_none_or(|next| next <= now);
            if is_due {
                clients.next_log = Some(now + LOG_INTERVAL);
            }
            (is_new, is_due)
        });
        if is_logged {
            warn!(
                endpoint = name,
                %client,
                "a client opens too many connections; ignoring its new connections for a second at a time"
            );
        }
        if is_new {
            self.attach(name, listener);
        }
    }

    /// Attaches the current filter to the listener.
    fn attach(&self, name: &'static str, listener: &TcpListener) {
        let address = |client: &Client| match client {
            Client::Address(address) => Some(*address),
            Client::User(_) | Client::Closed => None,
        };
        let ignored =
            self.with_clients(|clients| clients.ignored.keys().filter_map(address).collect());
        let attached = SockRef::from(listener).attach_filter(&program(ignored, LOOPBACK));
        if let Err(error) = attached {
            warn!(endpoint = name, %error, "cannot filter the connections of a listener");
        }
    }

    fn with_clients<T>(&self, run: impl FnOnce(&mut Clients) -> T) -> T {
        run(&mut self.clients.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Clients {
    /// Counts a connection. Returns true if its client is ignored from now on.
    fn count(&mut self, client: Client, now: Instant) -> bool {
        if self.window_start.is_none_or(|start| now >= start + WINDOW) {
            self.window_start = Some(now);
            self.counts.clear();
        }
        if self.counts.len() >= MAX_COUNTED && !self.counts.contains_key(&client) {
            return false;
        }
        let count = self.counts.entry(client).or_default();
        *count += 1;
        // Connections that were already in the queue may still arrive while the client is ignored.
        if *count < FLOOD || self.ignored.len() >= MAX_IGNORED {
            return false;
        }
        self.ignored.insert(client, now + IGNORED_FOR).is_none()
    }

    /// Removes the clients whose time is over.
    fn expire(&mut self, now: Instant) {
        self.ignored.retain(|_, until| *until > now);
    }
}

/// The opcodes of classic BPF (`include/uapi/linux/bpf_common.h`).
mod opcode {
    /// `BPF_LD | BPF_W | BPF_ABS`: loads a word of the packet.
    pub(super) const LOAD_WORD: u16 = 0x20;
    /// `BPF_LD | BPF_B | BPF_ABS`: loads a byte of the packet.
    pub(super) const LOAD_BYTE: u16 = 0x30;
    /// `BPF_ALU | BPF_AND | BPF_K`.
    pub(super) const AND: u16 = 0x54;
    /// `BPF_JMP | BPF_JEQ | BPF_K`: skips some instructions, depending on the loaded value.
    pub(super) const JUMP_IF_EQUAL: u16 = 0x15;
    /// `BPF_RET | BPF_K`: ends the program. The packet is dropped if the result is 0.
    pub(super) const RETURN: u16 = 0x06;
}

/// The offset that stands for the start of the IP header (`SKF_NET_OFF`). Other offsets are relative to the TCP
/// header.
const IP_HEADER: u32 = 0xfff0_0000;
/// The offset of the flags in the TCP header.
const FLAGS: u32 = 13;
/// The flags SYN and ACK. A packet that opens a connection has only the first one.
const SYN: u32 = 0x02;
const SYN_ACK: u32 = 0x12;

/// The offset that stands for the index of the network interface (`SKF_AD_OFF + SKF_AD_IFINDEX`).
const INTERFACE: u32 = 0xffff_f008;
/// The index of the loopback interface, which is the first one in every network namespace. Packets between
/// processes of this node arrive over it, whatever their addresses are.
const LOOPBACK: u32 = 1;

/// Returns a program that drops packets that open a connection from one of the given clients, unless they arrive
/// over the interface `local`. The kernel also applies the program to accepted connections, whose packets it must
/// not drop.
fn program(ignored: Vec<IpAddr>, local: u32) -> Vec<SockFilter> {
    use opcode::{AND, JUMP_IF_EQUAL, LOAD_BYTE, LOAD_WORD, RETURN};

    let run = |code, value| SockFilter::new(code, 0, 0, value);
    let accept = || run(RETURN, u32::MAX);
    let drop = || run(RETURN, 0);
    let mut program = vec![
        run(LOAD_WORD, INTERFACE),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, local),
        accept(),
        run(LOAD_BYTE, FLAGS),
        run(AND, SYN_ACK),
        SockFilter::new(JUMP_IF_EQUAL, 1, 0, SYN),
        accept(),
    ];
    for client in ignored {
        let (version, source, words) = match client {
            IpAddr::V4(v4) => (0x40, 12, vec![v4.to_bits()]),
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments().map(u32::from);
                (0x60, 8, vec![a << 16 | b, c << 16 | d])
            }
        };
        // Each test that fails skips the rest of this client's instructions.
        let tests = [(LOAD_BYTE, 0, version)].into_iter().chain(
            (source..)
                .step_by(4)
                .zip(words)
                .map(|(offset, word)| (LOAD_WORD, offset, word)),
        );
        let tests: Vec<_> = tests.collect();
        let mut rest = tests.len();
        for (load, offset, wanted) in tests {
            rest -= 1;
            program.push(run(load, IP_HEADER + offset));
            if load == LOAD_BYTE {
                program.push(run(AND, 0xf0));
            }
            // The remaining tests, each of two instructions, and the final one.
            let skipped = u8::try_from(2 * rest + 1).unwrap_or(u8::MAX);
            program.push(SockFilter::new(JUMP_IF_EQUAL, 0, skipped, wanted));
        }
        program.push(drop());
    }
    program.push(accept());
    program
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::*;

    fn client(text: &str) -> Client {
        Client::of_address(text.parse().expect("an address"))
    }

    fn address(client: Client) -> IpAddr {
        match client {
            Client::Address(address) => address,
            Client::User(_) | Client::Closed => panic!("{client} has no address"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_with_too_many_connections_is_ignored_for_a_second() {
        let mut clients = Clients::default();
        let [attacker, other] = ["192.0.2.9", "192.0.2.1"].map(client);
        for _ in 1..FLOOD {
            assert!(!clients.count(attacker, Instant::now()));
        }
        assert!(!clients.count(other, Instant::now()));
        assert!(clients.count(attacker, Instant::now()));
        // The client is already ignored.
        assert!(!clients.count(attacker, Instant::now()));
        assert_eq!(clients.ignored.keys().collect::<Vec<_>>(), [&attacker]);

        advance(IGNORED_FOR / 2).await;
        clients.expire(Instant::now());
        assert_eq!(clients.ignored.len(), 1);
        advance(IGNORED_FOR / 2).await;
        clients.expire(Instant::now());
        assert!(clients.ignored.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_with_few_connections_at_a_time_is_never_ignored() {
        let mut clients = Clients::default();
        for _ in 0..10 {
            for _ in 1..FLOOD {
                assert!(!clients.count(client("192.0.2.1"), Instant::now()));
            }
            advance(WINDOW).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_counted_and_ignored_clients_is_bounded() {
        let mut clients = Clients::default();
        for number in 0..u32::try_from(MAX_COUNTED).expect("a number") * 2 {
            let client = Client::Address(number.to_be_bytes().into());
            for _ in 0..if number < 100 { FLOOD } else { 1 } {
                clients.count(client, Instant::now());
            }
        }
        assert_eq!(clients.counts.len(), MAX_COUNTED);
        assert_eq!(clients.ignored.len(), MAX_IGNORED);
        let ignored = clients.ignored.into_keys().map(address).collect();
        assert!(program(ignored, LOOPBACK).len() < 4096);
    }

    /// Returns true if a client at `at` can connect to a listener that ignores the given clients.
    async fn connects(at: &str, ignored: &[&str], local: u32) -> bool {
        let listener = TcpListener::bind((at, 0)).await.expect("bound");
        let ignored = ignored.iter().map(|text| address(client(text)));
        let filter = program(ignored.collect(), local);
        SockRef::from(&listener)
            .attach_filter(&filter)
            .expect("attached");
        let address = listener.local_addr().expect("an address");
        let connect = TcpStream::connect(address);
        let connected = timeout(Duration::from_millis(300), connect).await;
        connected.is_ok_and(|stream| stream.is_ok())
    }

    #[tokio::test]
    async fn the_kernel_drops_the_packets_of_ignored_clients_only() {
        for (at, ignored, is_connected) in [
            ("127.0.0.1", &[][..], true),
            ("127.0.0.1", &["127.0.0.2", "::1", "10.0.0.1"], true),
            ("127.0.0.1", &["10.0.0.1", "127.0.0.1"], false),
            ("::1", &[], true),
            ("::1", &["2001:db8::1", "127.0.0.1", "0:0:0:1::"], true),
            ("::1", &["2001:db8::1", "::2"], false),
        ] {
            // These connections use the loopback interface, so the program gets another index.
            let connected = connects(at, ignored, u32::MAX).await;
            assert_eq!(connected, is_connected, "{at} {ignored:?}");
        }
        assert!(connects("127.0.0.1", &["127.0.0.1"], LOOPBACK).await);
        assert!(connects("::1", &["::1"], LOOPBACK).await);
    }
}
