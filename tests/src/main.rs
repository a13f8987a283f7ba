//! `culvert-lab`: holds places, and runs servers, loads, the demonstration and the benchmarks.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "reports are what this program is for"
)]

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use tunnel_tests::{
    agent::{
        Ground, Network,
        run::{Exec, exec, serve as hold},
    },
    bench::{self, connect, program::Options},
    demo, ends, environment, flow,
    instance::Settings,
    interrupt,
    load::{self, Plan, race, udp::Mode},
    pki::{self, Files},
    serve::{self, Listener},
    topology::Topology,
};

#[derive(Parser)]
#[command(about = "Culvert's laboratory", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hold a place and serve it on standard input; started by the laboratory.
    #[command(hide = true)]
    Agent {
        #[arg(long)]
        cgroup: PathBuf,
        #[arg(long)]
        network_of: Option<u32>,
        #[arg(long)]
        bpffs: Option<PathBuf>,
    },
    /// Start a program that dies with its parent; started by an agent.
    #[command(hide = true)]
    Exec {
        #[arg(long)]
        parent: i32,
        #[arg(long)]
        cpu: Option<usize>,
        #[arg(required = true, last = true)]
        argv: Vec<String>,
    },
    /// Show the product on a node of namespaces, with real traffic.
    Demo {
        /// The program to show; by default the one beside this program.
        #[arg(long)]
        culvert: Option<PathBuf>,
        /// Leave the node up until Enter.
        #[arg(long)]
        keep: bool,
    },
    /// Measure the product against targets.
    Bench {
        #[command(subcommand)]
        bench: Bench,
    },
    /// Make an empty node and hold it until Enter, an interrupt or the end of standard input.
    Up {
        /// How many pods it has.
        #[arg(long, default_value_t = 2)]
        pods: u8,
    },
    /// Serve ports, and give a record of it to whoever connects to a Unix socket.
    Serve {
        #[arg(long)]
        name: String,
        #[arg(long)]
        record: PathBuf,
        /// The certificate of ports of kind kubelet.
        #[arg(long, requires = "key")]
        cert: Option<PathBuf>,
        /// Its key.
        #[arg(long, requires = "cert")]
        key: Option<PathBuf>,
        /// KIND:PORT or KIND:FIRST-LAST, and =SERVICE,… behind it; KIND is http, echo, udp, sink
        /// or kubelet.
        #[arg(required = true)]
        listeners: Vec<Listener>,
    },
    /// Run an end of a tunnel without kernel programs, and tell of it to whoever connects to a
    /// Unix socket.
    End {
        role: EndRole,
        #[arg(long)]
        settings: PathBuf,
        #[arg(long)]
        record: PathBuf,
    },
    /// Streams to measure: a server that floods or echoes, and its clients.
    Flow {
        #[command(subcommand)]
        flow: Flow,
    },
    /// Make connections and print a report.
    Load {
        #[command(subcommand)]
        load: Load,
    },
    /// Connect UDP sockets to many VIPs as fast as can be, telling each which Service is meant.
    RaceRead {
        /// The first VIP and its port.
        #[arg(long)]
        first: SocketAddr,
        /// How many VIPs, one address after another.
        #[arg(long)]
        count: u32,
        /// VIP number k belongs to the Service STEM-k.
        #[arg(long)]
        stem: String,
        #[arg(long)]
        millis: u64,
        /// Connect one socket again and again, instead of a new one each time.
        #[arg(long)]
        reconnect: bool,
        /// The source address that the route to backends of the first Service gives.
        #[arg(long)]
        source: Option<IpAddr>,
        /// Send after one connect of so many, and after each that was led astray.
        #[arg(long, default_value_t = 1)]
        send_each: u64,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum EndRole {
    /// A gateway with an ingress.
    Cloud,
    /// An agent.
    Agent,
}

#[derive(Subcommand)]
enum Load {
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
    },
}

#[derive(Subcommand)]
enum Flow {
    /// Serve a port over TCP and a port over TLS.
    Serve {
        #[arg(long)]
        plain: u16,
        #[arg(long)]
        secure: u16,
        #[arg(long)]
        cert: PathBuf,
        #[arg(long)]
        key: PathBuf,
        /// A Unix socket that appears once both listen.
        #[arg(long)]
        ready: PathBuf,
    },
    /// Take floods over several connections.
    Flood(FlowClient),
    /// Have 64 bytes sent back, again and again.
    Echo(FlowClient),
    /// Ask for floods and read nothing of them, until the process is killed.
    Stall {
        #[command(flatten)]
        client: FlowClient,
        /// A file that appears once all are open.
        #[arg(long)]
        ready: PathBuf,
    },
}

#[derive(Args)]
struct FlowClient {
    #[arg(long)]
    to: SocketAddr,
    /// Over TLS: the authority of the server's certificate.
    #[arg(long, requires = "address")]
    ca: Option<PathBuf>,
    /// The address that the server must prove to have.
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

#[derive(Subcommand)]
enum Bench {
    /// What a connect costs, direct and with several numbers of Services.
    Connect {
        #[command(flatten)]
        common: Common,
        /// How often each variant is measured.
        #[arg(long, default_value_t = 31)]
        rounds: u32,
        /// The numbers of Services; none measures direct connects alone.
        #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,10000,100000")]
        services: Vec<u32>,
        /// How long one measurement lasts.
        #[arg(long, default_value_t = 150)]
        slot_millis: u64,
    },
    /// How long it takes from a file to the kernel.
    Program {
        #[command(flatten)]
        common: Common,
        #[arg(long, default_value_t = 1000)]
        services: u32,
        /// How often the Services are programmed from nothing.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// How often an endpoint changes.
        #[arg(long, default_value_t = 50)]
        changes: u32,
    },
    /// What a stream through the tunnel costs, beside plain TCP and bare TLS.
    Tunnel {
        #[command(flatten)]
        common: Common,
        /// How often each variant is measured.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// How long one measurement lasts.
        #[arg(long, default_value_t = 1500)]
        slot_millis: u64,
    },
}

#[derive(Args)]
struct Common {
    /// The program to measure; by default the one beside this program.
    #[arg(long)]
    culvert: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Fail when a target is missed.
    #[arg(long)]
    check: bool,
}

#[derive(Args)]
struct Paced {
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
        }
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("culvert-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    if matches!(
        command,
        Command::Demo { .. } | Command::Bench { .. } | Command::Up { .. }
    ) {
        interrupt::clean_up_first()?;
    }
    match command {
        Command::Agent {
            cgroup,
            network_of,
            bpffs,
        } => {
            let network = network_of.map_or(Network::Own, Network::Of);
            hold(&Ground {
                network,
                cgroup,
                bpffs,
            })
        }
        Command::Exec { parent, cpu, argv } => {
            let mut argv = argv.into_iter();
            let program = argv.next().unwrap_or_default().into();
            exec(&Exec {
                parent,
                cpu,
                program,
                arguments: argv.collect(),
            })
        }
        Command::Demo { culvert, keep } => demo::run(Settings::of(program(culvert)?), keep),
        Command::Bench { bench } => run_bench(bench),
        Command::Up { pods } => up(pods),
        Command::Serve {
            name,
            record,
            cert,
            key,
            listeners,
        } => {
            let certificate = cert.zip(key).map(|(cert, key)| Files {
                ca: PathBuf::new(),
                cert,
                key,
            });
            serve::run::serve(&name, &listeners, &record, certificate.as_ref())
        }
        Command::End {
            role,
            settings,
            record,
        } => match role {
            EndRole::Cloud => ends::run::cloud(&settings, &record),
            EndRole::Agent => ends::run::agent(&settings, &record),
        },
        Command::Flow { flow } => run_flow(flow),
        Command::Load { load } => run_load(load),
        Command::RaceRead {
            first,
            count,
            stem,
            millis,
            reconnect,
            source,
            send_each,
        } => {
            let lasting = Duration::from_millis(millis);
            print(&race::run(&race::Plan {
                first,
                count,
                stem,
                lasting,
                reconnect,
                source,
                send_each,
            })?)
        }
    }
}

fn program(given: Option<PathBuf>) -> Result<PathBuf> {
    given.map_or_else(environment::culvert, |path| Ok(path.canonicalize()?))
}

fn run_bench(bench: Bench) -> Result<()> {
    match bench {
        Bench::Connect {
            common,
            rounds,
            services,
            slot_millis,
        } => {
            let Common {
                culvert,
                json,
                check,
            } = common;
            let slot = Duration::from_millis(slot_millis);
            let culvert = program(culvert)?;
            connect::run(&connect::Options {
                culvert,
                rounds,
                services,
                slot,
                json,
                check,
            })
        }
        Bench::Program {
            common,
            services,
            rounds,
            changes,
        } => {
            let Common {
                culvert,
                json,
                check,
            } = common;
            let culvert = program(culvert)?;
            bench::program::run(&Options {
                culvert,
                services,
                rounds,
                changes,
                json,
                check,
            })
        }
        Bench::Tunnel {
            common,
            rounds,
            slot_millis,
        } => {
            let Common {
                culvert,
                json,
                check,
            } = common;
            bench::tunnel::run(&bench::tunnel::Options {
                culvert: program(culvert)?,
                rounds,
                slot: Duration::from_millis(slot_millis),
                json,
                check,
            })
        }
    }
}

fn run_flow(flow: Flow) -> Result<()> {
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
        Flow::Flood(client) => print(&flow::client::flood(
            &client.way()?,
            client.connections,
            client.lasting(),
        )?),
        Flow::Echo(client) => print(&flow::client::echo(&client.way()?, client.lasting())?),
        Flow::Stall { client, ready } => {
            let tell = || Ok(std::fs::write(&ready, "")?);
            flow::client::stall(&client.way()?, client.connections, tell)
        }
    }
}

fn up(pods: u8) -> Result<()> {
    let topology = Topology::new()?;
    for number in 1..=pods {
        topology.pod(&format!("pod-{number}"))?;
    }
    println!("{}", topology.ways_in());
    interrupt::wait_for_enter()
}

fn run_load(load: Load) -> Result<()> {
    match load {
        Load::Tcp(paced) => print(&load::tcp::run(&paced.into(), &load::own_sockets)),
        Load::Udp { paced, unconnected } => {
            let mode = if unconnected {
                Mode::Unconnected
            } else {
                Mode::Connected
            };
            print(&load::udp::run(&paced.into(), mode, &load::own_sockets))
        }
        Load::Kubelet { paced, ca } => {
            print(&load::kubelet::run(&paced.into(), &ca, &load::own_sockets)?)
        }
        Load::Dialog { to, ca, asks } => {
            print(&load::kubelet::dialog(to, &ca, &asks, &load::own_sockets)?)
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
            print(&load::connect::run(
                &plan,
                warm_up,
                Duration::from_millis(millis),
            ))
        }
        Load::Hold { tcp, udp, each } => {
            let held = load::hold::sockets(&load::hold::Plan { tcp, udp, each })?;
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

fn print(report: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(report)?);
    Ok(())
}
