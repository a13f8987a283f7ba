//! The subcommand `culvert-lab load`.
#![expect(clippy::print_stdout, reason = "the program prints reports")]

use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;
use clap::Subcommand;
use tunnel_tests::load::{self, Plan, connect, create_local_socket, hold, stream, udp::Mode};

#[derive(Subcommand)]
pub(crate) enum LoadCommand {
    /// Send HTTP requests, each over a new connection.
    Tcp(Plan),
    /// Send UDP requests, each from a new socket.
    Udp {
        #[command(flatten)]
        plan: Plan,
        /// Use unconnected sockets.
        #[arg(long)]
        unconnected: bool,
    },
    /// Send HTTPS requests to a kubelet-like server, each over a new connection.
    Kubelet {
        #[command(flatten)]
        plan: Plan,
        /// A PEM file with the CA that issued the server's certificate.
        #[arg(long)]
        ca: PathBuf,
    },
    /// Send requests to a kubelet-like server, one after another over a single connection.
    Dialog {
        #[arg(long)]
        to: SocketAddr,
        /// A PEM file with the CA that issued the server's certificate.
        #[arg(long)]
        ca: PathBuf,
        /// The requests to send: healthz, bytes=N, sum=N, echo=TEXT, upgrade, exchange=TEXT, pause=MILLIS,
        /// until-end=N, close, reset.
        #[arg(required = true)]
        asks: Vec<String>,
    },
    /// Connect sockets one after another, as fast as possible.
    Connect(connect::Plan),
    /// Send packets of one flow, as many as possible.
    Stream(stream::Plan),
    /// Receive what `stream` sends on a port, until this process is killed.
    Receive {
        #[arg(long)]
        port: u16,
    },
    /// Open sockets and keep them open until this process is killed.
    Hold(hold::Plan),
}

pub(crate) fn run(load: LoadCommand) -> Result<()> {
    match load {
        LoadCommand::Tcp(plan) => crate::print(&load::tcp::run(&plan, &create_local_socket)),
        LoadCommand::Udp { plan, unconnected } => {
            let mode = if unconnected {
                Mode::Unconnected
            } else {
                Mode::Connected
            };
            crate::print(&load::udp::run(&plan, mode, &create_local_socket))
        }
        LoadCommand::Kubelet { plan, ca } => {
            crate::print(&load::kubelet::run(&plan, &ca, &create_local_socket)?)
        }
        LoadCommand::Dialog { to, ca, asks } => crate::print(&load::kubelet::dialog(
            to,
            &ca,
            &asks,
            &create_local_socket,
        )?),
        LoadCommand::Connect(plan) => crate::print(&connect::run(&plan)),
        LoadCommand::Stream(plan) => crate::print(&stream::run(&plan)?),
        LoadCommand::Receive { port } => stream::receive(port, || println!("listening")),
        LoadCommand::Hold(plan) => {
            let sockets = hold::open_sockets(&plan)?;
            println!("{} sockets", sockets.len());
            park()
        }
    }
}

/// Blocks until this process is killed.
pub(crate) fn park() -> ! {
    loop {
        std::thread::park();
    }
}
