//! The subcommand `culvert-lab throughput`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::Result;
use clap::{Args, Subcommand};
use tunnel_tests::{
    pki::{self, PemFiles},
    throughput,
};

#[derive(Subcommand)]
pub(crate) enum ThroughputCommand {
    /// Serve one port over plain TCP and another over TLS.
    Serve {
        #[arg(long)]
        plain: u16,
        #[arg(long)]
        secure: u16,
        #[arg(long)]
        cert: PathBuf,
        #[arg(long)]
        key: PathBuf,
        /// The path at which a Unix socket is created once the server listens on both ports.
        #[arg(long)]
        ready: PathBuf,
    },
    /// Receive as much as possible over several connections, and print the throughput.
    Flood(ClientOptions),
    /// Have the server echo 64 bytes repeatedly, and print the latency.
    Echo(ClientOptions),
    /// Open connections that the server floods, and read nothing from them until this process is killed.
    Stall(HoldOptions),
    /// Open connections and leave them idle until this process is killed.
    Idle(HoldOptions),
}

#[derive(Args)]
pub(crate) struct ClientOptions {
    #[arg(long)]
    to: SocketAddr,
    /// A PEM file with the CA that issued the server's certificate; enables TLS.
    #[arg(long, requires = "address")]
    ca: Option<PathBuf>,
    /// The address for which the server's certificate must be valid.
    #[arg(long)]
    address: Option<IpAddr>,
    #[arg(long, default_value_t = 1)]
    connections: u32,
    #[arg(long, default_value_t = 1000)]
    millis: u64,
}

impl ClientOptions {
    fn target(&self) -> Result<throughput::client::Target> {
        let tls = self.ca.as_deref().map(pki::client_config).transpose()?;
        Ok(throughput::client::Target {
            to: self.to,
            tls: tls.zip(self.address),
        })
    }

    const fn duration(&self) -> Duration {
        Duration::from_millis(self.millis)
    }
}

#[derive(Args)]
pub(crate) struct HoldOptions {
    #[command(flatten)]
    client: ClientOptions,
    /// The path at which a file is created once all connections are open.
    #[arg(long)]
    ready: PathBuf,
}

impl HoldOptions {
    /// Opens connections in a mode, creates the file `ready`, and waits forever.
    fn hold(&self, mode: u8) -> Result<()> {
        let Self { client, ready } = self;
        let on_open = || Ok(std::fs::write(ready, "")?);
        throughput::client::hold(&client.target()?, client.connections, mode, on_open)
    }
}

pub(crate) fn run(command: ThroughputCommand) -> Result<()> {
    match command {
        ThroughputCommand::Serve {
            plain,
            secure,
            cert,
            key,
            ready,
        } => {
            let ca = PathBuf::new();
            let tls = PemFiles { ca, cert, key }.server_config()?;
            throughput::server::serve(plain, secure, tls, &ready)
        }
        ThroughputCommand::Flood(client) => crate::print(&throughput::client::flood(
            &client.target()?,
            client.connections,
            client.duration(),
        )?),
        ThroughputCommand::Echo(client) => crate::print(&throughput::client::echo(
            &client.target()?,
            client.duration(),
        )?),
        ThroughputCommand::Stall(options) => options.hold(throughput::STALL),
        ThroughputCommand::Idle(options) => options.hold(throughput::ECHO),
    }
}
