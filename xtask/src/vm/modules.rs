//! The modules that guests load, in the order of their dependencies.
//!
//! Debian's packages have no `modules.dep`: it is generated at installation. The dependencies of a
//! module are in its section `.modinfo`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use object::{Object as _, ObjectSection as _};

/// The modules for tests and for interactive use of guests. The others are left out.
pub(super) const WANTED: &[&str] = &[
    // Links.
    "veth",
    "dummy",
    "vxlan",
    "geneve",
    "8021q",
    "bridge",
    "br_netfilter",
    "tun",
    "wireguard",
    // Programs at tc, and a network that is slow or loses packets.
    "sch_ingress",
    "cls_bpf",
    "act_bpf",
    "sch_netem",
    "sch_fq",
    // Finding and ending sockets.
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "raw_diag",
    "unix_diag",
    // Protocols.
    "sctp",
    "sctp_diag",
    "tls",
    // Modules that kube-proxy leaves loaded, and those of other programs on a node.
    "ip_vs",
    "ip_vs_rr",
    "ip_vs_sh",
    "ip_vs_wrr",
    "ip_set",
    "xt_set",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nf_tables",
    "nft_chain_nat",
    "nft_nat",
    "nft_masq",
    "nft_ct",
    "nft_fib_inet",
    "nft_reject_inet",
    "nft_compat",
    "ip_tables",
    "iptable_nat",
    "iptable_filter",
    "iptable_mangle",
    "iptable_raw",
    "ip6_tables",
    "ip6table_nat",
    "ip6table_filter",
    "xt_tcpudp",
    "xt_conntrack",
    "xt_comment",
    "xt_mark",
    "xt_addrtype",
    "xt_nat",
    "xt_MASQUERADE",
    "xt_REDIRECT",
    "xt_TPROXY",
    "xt_socket",
    "xt_statistic",
    "xt_recent",
    "xt_ipvs",
];

/// The end of a signed module.
const SIGNED: &[u8] = b"~Module signature appended~\n";
/// The length of the signature's metadata before that; its last four bytes are the signature's length.
const TRAILER: usize = 12;

/// A program of apt that decompresses any file. Small machines lack `xz`, whereas apt is always present
/// here.
const DECOMPRESSOR: &str = "/usr/lib/apt/apt-helper";

/// The modules of a kernel.
#[derive(Debug)]
pub(super) struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// A module in the form that the kernel loads.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) name: String,
    /// Decompressed and without a signature: its check makes loading five times slower.
    pub(super) data: Vec<u8>,
}

/// The kind of a name in a kernel.
#[derive(Debug, Eq, PartialEq)]
enum Known {
    /// A module that needs others.
    Module(Needs),
    Builtin,
    Nothing,
}

#[derive(Debug, Default, Eq, PartialEq)]
struct Needs {
    /// Modules that it can't be loaded without.
    hard: Vec<String>,
    /// Modules that are loaded before it if the kernel has them.
    soft: Vec<String>,
}

impl Modules {
    /// Lists the modules in a folder `lib/modules/<release>`.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("modules.builtin");
        let builtin =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut files = BTreeMap::new();
        walk(folder, &mut files).with_context(|| format!("cannot list {}", folder.display()))?;
        ensure!(!files.is_empty(), "{} holds no modules", folder.display());
        Ok(Self {
            files,
            builtin: builtin.lines().filter_map(name_of).collect(),
        })
    }

    /// Returns those of the names that the kernel has neither as a module nor built in.
    pub(super) fn absent(&self, wanted: &[&str]) -> Vec<String> {
        let names = wanted.iter().map(|name| name.replace('-', "_"));
        names
            .filter(|name| !self.files.contains_key(name) && !self.builtin.contains(name))
            .collect()
    }

    /// Returns the wanted modules and their dependencies, each after its own dependencies.
    pub(super) fn load_order(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut data = BTreeMap::new();
        let names = order(wanted, |name| {
            if let Some(path) = self.files.get(name) {
                let read = || {
                    let module = without_signature(decompressed(path)?)?;
                    let needs = needs(&module)?;
                    anyhow::Ok((module, needs))
                };
                let (module, needs) = read().with_context(|| path.display().to_string())?;
                data.insert(name.to_owned(), module);
                return Ok(Known::Module(needs));
            }
            if self.builtin.contains(name) {
                return Ok(Known::Builtin);
            }
            Ok(Known::Nothing)
        })?;
        Ok(names
            .into_iter()
            .filter_map(|name| {
                let data = data.remove(&name)?;
                Some(Module { name, data })
            })
            .collect())
    }
}

/// Orders modules depth first. Names that the kernel lacks are skipped unless another module needs them.
fn order(wanted: &[&str], mut look: impl FnMut(&str) -> Result<Known>) -> Result<Vec<String>> {
    let mut visit = Visit {
        look: &mut look,
        seen: BTreeSet::new(),
        order: Vec::new(),
    };
    for name in wanted {
        visit.module(&name.replace('-', "_"))?;
    }
    Ok(visit.order)
}

/// The state of the traversal.
struct Visit<'a> {
    look: &'a mut dyn FnMut(&str) -> Result<Known>,
    seen: BTreeSet<String>,
    order: Vec<String>,
}

impl Visit<'_> {
    /// Adds a module; returns true if the kernel has it.
    fn module(&mut self, name: &str) -> Result<bool> {
        if self.seen.contains(name) {
            return Ok(true);
        }
        let needs = match (self.look)(name)? {
            Known::Module(needs) => needs,
            Known::Builtin => return Ok(true),
            Known::Nothing => return Ok(false),
        };
        self.seen.insert(name.to_owned());
        for soft in &needs.soft {
            if !self.module(soft)? && soft == "crc32c" {
                // The name of an algorithm; only this implementation is useful for the wanted modules.
                self.module("crc32c_generic")?;
            }
        }
        for hard in &needs.hard {
            if !self.module(hard)? {
                bail!("module {name} needs {hard}, which its kernel doesn't have");
            }
        }
        self.order.push(name.to_owned());
        Ok(true)
    }
}

/// Returns the dependencies that a module declares.
fn needs(module: &[u8]) -> Result<Needs> {
    let file = object::File::parse(module).context("no ELF object")?;
    let section = file.section_by_name(".modinfo");
    let section = section.context("no section .modinfo")?;
    Ok(needs_in(section.data()?))
}

/// Parses entries `key=value`, each terminated by a zero byte.
fn needs_in(modinfo: &[u8]) -> Needs {
    let mut needs = Needs::default();
    for entry in modinfo.split(|&byte| byte == 0) {
        let entry = String::from_utf8_lossy(entry);
        match entry.split_once('=') {
            Some(("depends", names)) => {
                let names = names.split(',').filter(|name| !name.is_empty());
                needs.hard.extend(names.map(|name| name.replace('-', "_")));
            }
            Some(("softdep", text)) => needs.soft.extend(softdeps_before(text)),
            Some(_) | None => {}
        }
    }
    needs
}

/// Returns the names after `pre:` in a text such as `pre: a b post: c`.
fn softdeps_before(text: &str) -> Vec<String> {
    let mut is_before = false;
    let mut names = Vec::new();
    for word in text.split_whitespace() {
        if word.ends_with(':') {
            is_before = word == "pre:";
        } else if is_before {
            names.push(word.replace('-', "_"));
        }
    }
    names
}

fn without_signature(mut module: Vec<u8>) -> Result<Vec<u8>> {
    let Some(rest) = module.strip_suffix(SIGNED) else {
        return Ok(module);
    };
    let (rest, trailer) = rest
        .split_last_chunk::<TRAILER>()
        .context("the signature is cut off")?;
    let [.., a, b, c, d] = *trailer;
    let signature = usize::try_from(u32::from_be_bytes([a, b, c, d]))?;
    let end = rest.len().checked_sub(signature);
    module.truncate(end.context("the signature is longer than the module")?);
    Ok(module)
}

fn decompressed(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|kind| kind == "ko") {
        return Ok(fs::read(path)?);
    }
    let output = Command::new(DECOMPRESSOR)
        .arg("cat-file")
        .arg(path)
        .output()
        .with_context(|| format!("cannot start {DECOMPRESSOR}"))?;
    ensure!(
        output.status.success(),
        "{DECOMPRESSOR} cannot decompress it: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

fn walk(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            walk(&path, files)?;
        } else if let Some(name) = path.to_str().and_then(name_of) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// Returns the name of a module by the path of its file.
fn name_of(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (name, compression) = file.split_once(".ko")?;
    matches!(compression, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

#[cfg(test)]
mod tests;
