//! `culvert-lab bench`.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;
use clap::{Args, Subcommand};
use tunnel_tests::bench::{api, connect, program, tunnel};

use crate::program as given;

#[derive(Subcommand)]
pub(crate) enum Bench {
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
        /// For how many Services there are nftables rules of kube-proxy's shape; none leaves them out.
        #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,5000")]
        nft: Vec<u32>,
        /// For how many Services there are iptables rules of that shape; none leaves them out.
        #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,10000")]
        iptables: Vec<u32>,
        /// How long one measurement lasts.
        #[arg(long, default_value_t = 150)]
        slot_millis: u64,
    },
    /// How long it takes from a file to the kernel, beside nftables rules; what it takes of memory.
    Program {
        #[command(flatten)]
        common: Common,
        /// How many Services there are where there are some.
        #[arg(long, default_value_t = 1000)]
        services: u32,
        /// How often the Services are programmed from nothing.
        #[arg(long, default_value_t = 5)]
        rounds: u32,
        /// How often an endpoint changes.
        #[arg(long, default_value_t = 50)]
        changes: u32,
        /// How many Services there are where there are very many, of four endpoints each.
        #[arg(long, default_value_t = 30_000)]
        many: u32,
        /// How often a daemon starts with very many, and rules are loaded; 0 leaves both out.
        #[arg(long, default_value_t = 5)]
        starts: u32,
        /// For how many Services nftables rules of kube-proxy's shape are loaded; none leaves them out.
        #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,5000")]
        rules: Vec<u32>,
    },
    /// How long it takes from the API server to the kernel, beside kube-proxy.
    Api {
        #[command(flatten)]
        common: Common,
        /// The folder of programs that `cargo xtask e2e` makes.
        #[arg(long)]
        kit: PathBuf,
        /// How many Services there are, of five endpoints each.
        #[arg(long, default_value_t = 5000)]
        services: u32,
        /// How often each proxy is started from nothing.
        #[arg(long, default_value_t = 3)]
        rounds: u32,
        /// How often an endpoint changes; for kube-proxy a tenth of that.
        #[arg(long, default_value_t = 200)]
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
pub(crate) struct Common {
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

impl Common {
    fn program(&self) -> Result<PathBuf> {
        given(self.culvert.clone())
    }
}

impl Bench {
    /// Measures.
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Connect {
                common,
                rounds,
                services,
                nft,
                iptables,
                slot_millis,
            } => connect::run(&connect::Options {
                culvert: common.program()?,
                rounds,
                services,
                nft,
                iptables,
                slot: Duration::from_millis(slot_millis),
                json: common.json,
                check: common.check,
            }),
            Self::Program {
                common,
                services,
                rounds,
                changes,
                many,
                starts,
                rules,
            } => program::run(&program::Options {
                culvert: common.program()?,
                services,
                rounds,
                changes,
                many,
                starts,
                rules,
                json: common.json,
                check: common.check,
            }),
            Self::Api {
                common,
                kit,
                services,
                rounds,
                changes,
            } => api::run(&api::Options {
                culvert: common.program()?,
                kit,
                services,
                rounds,
                changes,
                json: common.json,
                check: common.check,
            }),
            Self::Tunnel {
                common,
                rounds,
                slot_millis,
            } => tunnel::run(&tunnel::Options {
                culvert: common.program()?,
                rounds,
                slot: Duration::from_millis(slot_millis),
                json: common.json,
                check: common.check,
            }),
        }
    }
}
