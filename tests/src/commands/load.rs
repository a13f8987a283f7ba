//! `culvert-lab load`.
#![expect(clippy::print_stdout, reason = "reports are what this program is for")]

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::Result;
use clap::{Args, Subcommand};
use tunnel_tests::load::{self, Enough, Plan, udp::Mode};

#[derive(Subcommand)]
pub(crate) enum Load {
    /// HTTP requests, each over a connection of its own.
    Tcp(Paced),
    /// Questions over UDP, each from a socket of its own.
    Udp {
        #[command(flatten)]
        paced: Paced,
        /// Send without connecting.
        #[arg(long)]
        unconnected: bool,
    },
    /// Requests over TLS to a kubelet-like server, each over a connection of its own.
    Kubelet {
        #[command(flatten)]
        paced: Paced,
        /// The authority of the server's certificate.
        #[arg(long)]
        ca: PathBuf,
    },
    /// One connection to a kubelet-like server, and one request after another.
    Dialog {
        #[arg(long)]
        to: SocketAddr,
        /// The authority of the server's certificate.
        #[arg(long)]
        ca: PathBuf,
        /// healthz, bytes=N, sum=N, echo=TEXT, upgrade, exchange=TEXT, pause=MILLIS, until-end=N,
        /// close, reset.
        #[arg(required = true)]
        asks: Vec<String>,
    },
    /// Connects one after another, as fast as can be.
    Connect {
        /// The first address and the port.
        #[arg(long)]
        to: SocketAddr,
        /// How many addresses, one after another, are taken in turn.
        #[arg(long, default_value_t = 1)]
        count: u32,
        /// How far one address is from the next.
        #[arg(long, default_value_t = 1)]
        apart: u32,
        #[arg(long, default_value_t = 50)]
        warm_up_millis: u64,
        #[arg(long)]
        millis: u64,
    },
    /// Connect sockets and hold them until the process is killed.
    Hold {
        /// Where TCP connects.
        #[arg(long)]
        tcp: Vec<SocketAddr>,
        /// Where UDP sockets connect, and others send without connecting.
        #[arg(long)]
        udp: Vec<SocketAddr>,
        /// How many sockets there are of each kind and address.
        #[arg(long)]
        each: u32,
        /// How many are opened and closed before.
        #[arg(long, default_value_t = 0)]
        before: u32,
    },
}

#[derive(Args)]
pub(crate) struct Paced {
    /// Where to; several are taken in turn.
    #[arg(long, required = true)]
    to: Vec<SocketAddr>,
    /// The Service that is meant, told to the servers.
    #[arg(long)]
    service: Option<String>,
    /// Attempts a second.
    #[arg(long)]
    rate: u32,
    #[arg(long)]
    millis: u64,
    /// How many attempts may be under way at once.
    #[arg(long, default_value_t = 8)]
    workers: u32,
}

impl From<Paced> for Plan {
    fn from(paced: Paced) -> Self {
        let Paced {
            to,
            service,
            rate,
            millis,
            workers,
        } = paced;
        Self {
            to,
            service,
            rate,
            lasting: Duration::from_millis(millis),
            workers,
            enough: Enough::default(),
        }
    }
}

pub(crate) fn run(load: Load) -> Result<()> {
    match load {
        Load::Tcp(paced) => crate::print(&load::tcp::run(&paced.into(), &load::own_sockets)),
        Load::Udp { paced, unconnected } => {
            let mode = if unconnected {
                Mode::Unconnected
            } else {
                Mode::Connected
            };
            crate::print(&load::udp::run(&paced.into(), mode, &load::own_sockets))
        }
        Load::Kubelet { paced, ca } => {
            crate::print(&load::kubelet::run(&paced.into(), &ca, &load::own_sockets)?)
        }
        Load::Dialog { to, ca, asks } => {
            crate::print(&load::kubelet::dialog(to, &ca, &asks, &load::own_sockets)?)
        }
        Load::Connect {
            to,
            count,
            apart,
            warm_up_millis,
            millis,
        } => {
            let warm_up = Duration::from_millis(warm_up_millis);
            let plan = load::connect::Plan {
                first: to,
                count,
                apart,
            };
            crate::print(&load::connect::run(
                &plan,
                warm_up,
                Duration::from_millis(millis),
            ))
        }
        Load::Hold {
            tcp,
            udp,
            each,
            before,
        } => {
            let plan = load::hold::Plan {
                tcp,
                udp,
                each,
                before,
            };
            let held = load::hold::sockets(&plan)?;
            println!("{} sockets", held.len());
            park()
        }
    }
}

/// Does nothing until the process is killed.
fn park() -> ! {
    loop {
        std::thread::park();
    }
}
