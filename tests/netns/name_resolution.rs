//! Tests that an agent resolves gateway names in an image that contains only the program. The resolver is
//! part of the statically linked C library, and reads the two files that a container runtime adds to the
//! image.
//!
//! CI tests the image's static program. If the program is dynamically linked instead, the test also copies
//! its libraries.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tunnel_tests::{
    environment,
    node::Node,
    pki::PemFiles,
    sandbox::{RESPONSE_TIMEOUT, Sandbox},
    wait,
};

use crate::support::{CHANGE_TIMEOUT, run};

/// The time for which the name server waits for a request before it closes a connection.
const IDLE: Duration = Duration::from_millis(200);

/// A name server that knows two names, one of which it resolves only over TCP.
struct NameServer {
    udp: UdpSocket,
    tcp: TcpListener,
}

/// Encodes a name as length-prefixed labels (RFC 1035 section 3.1).
fn labels(name: &str) -> Vec<u8> {
    let label = |label: &str| [&[label.len().to_le_bytes()[0]], label.as_bytes()].concat();
    let mut labels: Vec<u8> = name.split('.').flat_map(label).collect();
    labels.push(0);
    labels
}

/// Builds the response to a query (RFC 1035 section 4): 127.0.0.1 for the known names, NXDOMAIN for any
/// other.
fn answer(question: &[u8], is_tcp: bool) -> Option<Vec<u8>> {
    let (header, asked) = question.split_at_checked(12)?;
    let end = asked.iter().position(|byte| *byte == 0)? + 1;
    let name = &asked[..end];
    let is_plain = name == labels("plain.test");
    let is_long = name == labels("long.cluster.test");
    let is_address = asked.get(end..end + 2)? == [0, 1];
    let flags: [u8; 2] = match (is_plain, is_long) {
        (true, _) => [0x81, 0x80],
        (_, true) if is_tcp => [0x81, 0x80],
        // Set the TC (truncated) flag, so that the client retries over TCP.
        (_, true) => [0x83, 0x80],
        // Set RCODE 3 (NXDOMAIN).
        (false, false) => [0x81, 0x83],
    };
    let is_answered = is_address && (is_plain || is_tcp && is_long);
    let mut answer = header[..2].to_vec();
    answer.extend(flags);
    answer.extend([0, 1, 0, u8::from(is_answered), 0, 0, 0, 0]);
    answer.extend(asked.get(..end + 4)?);
    if is_answered {
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]);
    }
    Some(answer)
}

impl NameServer {
    fn new(sandbox: &Sandbox) -> Result<Self> {
        let udp = sandbox.udp("127.0.0.1:53")?;
        let tcp = sandbox.listen("127.0.0.1:53")?;
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok(Self { udp, tcp })
    }

    /// Answers all queries that have arrived.
    fn serve(&self) -> Result<()> {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = self.udp.recv_from(&mut buffer) {
            let answer = answer(&buffer[..length], false).context("no question")?;
            self.udp.send_to(&answer, from)?;
        }
        while let Ok((stream, _)) = self.tcp.accept() {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(IDLE))?;
            while serve_one(&stream)? {}
        }
        Ok(())
    }
}

/// Answers one query over TCP. Returns false if no query arrives.
fn serve_one(mut stream: &TcpStream) -> Result<bool> {
    let mut length = [0; 2];
    match stream.read_exact(&mut length).map_err(|it| it.kind()) {
        Ok(()) => {}
        Err(ErrorKind::UnexpectedEof | ErrorKind::WouldBlock) => return Ok(false),
        Err(other) => bail!("{other}"),
    }
    let mut question = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut question)?;
    let answer = answer(&question, true).context("no question")?;
    stream.write_all(&u16::try_from(answer.len())?.to_be_bytes())?;
    stream.write_all(&answer)?;
    Ok(true)
}

/// Copies the program and any libraries it needs into a root directory.
fn copy_program(root: &Path) -> Result<()> {
    let program = environment::culvert()?;
    fs::copy(&program, root.join("culvert"))?;
    // `ldd` fails for a static program. Virtual machines lack `ldd`, but they run only static programs.
    let Ok(listing) = Command::new("ldd").arg(&program).output() else {
        return Ok(());
    };
    let listing = String::from_utf8_lossy(&listing.stdout).into_owned();
    let words = listing.split_whitespace();
    for library in words.filter(|word| word.starts_with('/') && !word.ends_with(':')) {
        let sandbox = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(sandbox.parent().context("no directory")?)?;
        fs::copy(library, sandbox)?;
    }
    Ok(())
}

/// Creates a CA, issues an agent's certificate, and writes the agent's config.
fn write_agent_config(node: &Node, root: &Path) -> Result<()> {
    let program = environment::culvert()?.display().to_string();
    let path = root.display();
    for words in [
        format!("init --dir {path}/ca"),
        format!("issue agent --node edge-7 --dir {path}/ca --out {path}/identity"),
    ] {
        run(node.host(), &format!("{program} ca {words}"))?;
    }
    let PemFiles { ca, cert, key } = PemFiles::issued(Path::new("/identity"));
    let config = format!(
        "stateDir: /state\n\
         tunnel:\n\
         \x20 agent: {{ gateways: [\"long:10262\", \"plain.test:10263\", \"static.test:10264\"] }}\n\
         \x20 identity: {{ files: {{ ca: {}, cert: {}, key: {} }} }}\n",
        ca.display(),
        cert.display(),
        key.display(),
    );
    fs::write(root.join("culvert.yaml"), config)?;
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: a resolver in the C library"]
fn an_agent_resolves_gateway_names_with_two_files_of_its_container() -> Result<()> {
    let node = Node::new()?;
    let root = node.network().lab().directory().join("root");
    fs::create_dir_all(root.join("etc"))?;
    fs::write(root.join("etc/hosts"), "127.0.0.1 static.test\n")?;
    let resolver = "nameserver 127.0.0.1\nsearch none.test cluster.test\noptions ndots:5\n";
    fs::write(root.join("etc/resolv.conf"), resolver)?;
    copy_program(&root)?;
    write_agent_config(&node, &root)?;
    let host = node.host();
    let names = NameServer::new(host)?;
    let listen = |port: u16| -> Result<TcpListener> {
        let listener = host.listen(("127.0.0.1", port))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    let gateways = [listen(10_262)?, listen(10_263)?, listen(10_264)?];

    let root = root.display().to_string();
    let agent = ["/culvert", "agent", "--config", "/culvert.yaml"];
    let words = [&["chroot", &root][..], &agent].concat();
    let agent = host.command(&words).start()?;

    let mut reached = [false; 3];
    let all = wait::until(CHANGE_TIMEOUT, || {
        let served = names.serve().is_ok();
        for (gateway, reached) in gateways.iter().zip(&mut reached) {
            *reached |= gateway.accept().is_ok();
        }
        served && reached.iter().all(|reached| *reached)
    });
    if all.is_err() {
        agent.signal(nix::sys::signal::Signal::SIGKILL)?;
        bail!(
            "gateways reached: {reached:?}; the agent: {:?}",
            agent.finish(RESPONSE_TIMEOUT)?
        );
    }
    Ok(())
}
