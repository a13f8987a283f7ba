//! The subcommand `culvert-lab throughput`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::Result;
use clap::{Args, Subcommand};
use tunnel_tests::{
    flow,
    pki::{self, Files},
};

#[derive(Subcommand)]
pub(crate) enum Flow {
    /// Serve one port over TCP and one over TLS.
    Serve {
        #[arg(long)]
        plain: u16,
        #[arg(long)]
        secure: u16,
        #[arg(long)]
        cert: PathBuf,
        #[arg(long)]
        key: PathBuf,
        /// A Unix socket that is created once both ports listen.
        #[arg(long)]
        ready: PathBuf,
    },
    /// Receive as much as possible over several connections, and print the throughput.
    Flood(FlowClient),
    /// Have the server echo 64 bytes repeatedly, and print the latency.
    Echo(FlowClient),
    /// Open connections that the server floods and nobody reads, until the process is killed.
    Stall {
        #[command(flatten)]
        client: FlowClient,
        /// A file that is created once all connections are open.
        #[arg(long)]
        ready: PathBuf,
    },
}

#[derive(Args)]
pub(crate) struct FlowClient {
    #[arg(long)]
    to: SocketAddr,
    /// The CA of the server's certificate; enables TLS.
    #[arg(long, requires = "address")]
    ca: Option<PathBuf>,
    /// The address that the server's certificate must be valid for.
    #[arg(long)]
    address: Option<IpAddr>,
    #[arg(long, default_value_t = 1)]
    connections: u32,
    #[arg(long, default_value_t = 1000)]
    millis: u64,
}

impl FlowClient {
    fn way(&self) -> Result<flow::client::Way> {
        let tls = self.ca.as_deref().map(pki::trusting).transpose()?;
        Ok(flow::client::Way {
            to: self.to,
            tls: tls.zip(self.address),
        })
    }

    const fn lasting(&self) -> Duration {
        Duration::from_millis(self.millis)
    }
}

pub(crate) fn run(flow: Flow) -> Result<()> {
    match flow {
        Flow::Serve {
            plain,
            secure,
            cert,
            key,
            ready,
        } => {
            let ca = PathBuf::new();
            let tls = Files { ca, cert, key }.server()?;
            flow::serve::serve(plain, secure, tls, &ready)
        }
        Flow::Flood(client) => crate::print(&flow::client::flood(
            &client.way()?,
            client.connections,
            client.lasting(),
        )?),
        Flow::Echo(client) => crate::print(&flow::client::echo(&client.way()?, client.lasting())?),
        Flow::Stall { client, ready } => {
            let tell = || Ok(std::fs::write(&ready, "")?);
            flow::client::stall(&client.way()?, client.connections, tell)
        }
    }
}
