//! Reads the kernel modules that virtual machines load, in dependency order.
//!
//! Debian's packages contain no `modules.dep`, which is generated at installation. The dependencies are read
//! from each module's `.modinfo` section.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use object::{Object as _, ObjectSection as _};

/// Modules that tests need, or that are useful in a virtual machine's shell. All others are left out.
pub(super) const WANTED: &[&str] = &[
    // Network interfaces.
    "veth",
    "dummy",
    "vxlan",
    "geneve",
    "8021q",
    "bonding",
    "macvlan",
    "sit",
    "bridge",
    "br_netfilter",
    "tun",
    "wireguard",
    // tc programs, and packet delay or loss.
    "sch_ingress",
    "cls_bpf",
    "act_bpf",
    "sch_netem",
    "sch_fq",
    // Listing and destroying sockets.
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "raw_diag",
    "unix_diag",
    // Protocols.
    "sctp",
    "sctp_diag",
    "tls",
    // An NFS server and a client.
    "nfsd",
    "nfs",
    "nfsv4",
    // Modules that kube-proxy and other programs load on nodes.
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

/// The last bytes of a signed module.
const SIGNATURE_MARK: &[u8] = b"~Module signature appended~\n";
/// Length of the metadata before the mark. Its last four bytes are the signature's length, in big-endian
/// order.
const METADATA_LENGTH: usize = 12;

/// A program that belongs to apt and decompresses files. `xz` may be missing, but apt is installed on every
/// host that runs this.
const DECOMPRESSOR: &str = "/usr/lib/apt/apt-helper";

/// A kernel's modules.
#[derive(Debug)]
pub(super) struct Modules {
    /// Paths of the module files, by module name.
    files: BTreeMap<String, PathBuf>,
    /// Names of the modules that are built into the kernel.
    builtin: BTreeSet<String>,
}

/// A module to load.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) name: String,
    /// The ELF file, decompressed and without its signature, which the kernel would take a long time to
    /// verify.
    pub(super) data: Vec<u8>,
}

/// The result of looking up a module by name.
#[derive(Debug, Eq, PartialEq)]
enum Lookup {
    /// A module file, with these dependencies.
    Module(Dependencies),
    /// Built into the kernel.
    Builtin,
    NotFound,
}

/// The modules to load before a given module.
#[derive(Debug, Default, Eq, PartialEq)]
struct Dependencies {
    /// Modules without which the given module cannot be loaded.
    required: Vec<String>,
    /// Modules that are loaded first if the kernel has them.
    soft: Vec<String>,
}

impl Modules {
    /// Lists the modules below the directory `lib/modules/<release>`.
    pub(super) fn read(directory: &Path) -> Result<Self> {
        let path = directory.join("modules.builtin");
        let builtin =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut files = BTreeMap::new();
        list_modules(directory, &mut files)
            .with_context(|| format!("cannot list {}", directory.display()))?;
        ensure!(
            !files.is_empty(),
            "the directory {} has no modules",
            directory.display()
        );
        Ok(Self {
            files,
            builtin: builtin.lines().filter_map(module_name).collect(),
        })
    }

    /// Returns the wanted modules that the kernel lacks.
    pub(super) fn absent(&self, wanted: &[&str]) -> Vec<String> {
        let names = wanted.iter().map(|name| name.replace('-', "_"));
        names
            .filter(|name| !self.files.contains_key(name) && !self.builtin.contains(name))
            .collect()
    }

    /// Reads the wanted modules and their dependencies, in the order in which they can be loaded.
    pub(super) fn load_order(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut data = BTreeMap::new();
        let names = order(wanted, |name| {
            if let Some(path) = self.files.get(name) {
                let read = || {
                    let module = strip_signature(decompress(path)?)?;
                    let dependencies = read_dependencies(&module)?;
                    anyhow::Ok((module, dependencies))
                };
                let (module, dependencies) =
                    read().with_context(|| format!("cannot read {}", path.display()))?;
                data.insert(name.to_owned(), module);
                return Ok(Lookup::Module(dependencies));
            }
            if self.builtin.contains(name) {
                return Ok(Lookup::Builtin);
            }
            Ok(Lookup::NotFound)
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

/// Sorts modules so that each comes after its dependencies. A wanted module that the kernel lacks is skipped,
/// unless another module requires it.
fn order(wanted: &[&str], mut look_up: impl FnMut(&str) -> Result<Lookup>) -> Result<Vec<String>> {
    let mut traversal = Traversal {
        look_up: &mut look_up,
        visited: BTreeSet::new(),
        order: Vec::new(),
    };
    for name in wanted {
        traversal.visit(&name.replace('-', "_"))?;
    }
    Ok(traversal.order)
}

/// A depth-first traversal of the dependencies.
struct Traversal<'a> {
    look_up: &'a mut dyn FnMut(&str) -> Result<Lookup>,
    visited: BTreeSet<String>,
    order: Vec<String>,
}

impl Traversal<'_> {
    /// Adds a module after its dependencies; returns true if the kernel has the module.
    fn visit(&mut self, name: &str) -> Result<bool> {
        if self.visited.contains(name) {
            return Ok(true);
        }
        let dependencies = match (self.look_up)(name)? {
            Lookup::Module(dependencies) => dependencies,
            Lookup::Builtin => return Ok(true),
            Lookup::NotFound => return Ok(false),
        };
        self.visited.insert(name.to_owned());
        for soft in &dependencies.soft {
            if !self.visit(soft)? && soft == "crc32c" {
                // This is the name of an algorithm, and the wanted modules need only its generic
                // implementation.
                self.visit("crc32c_generic")?;
            }
        }
        for required in &dependencies.required {
            if !self.visit(required)? {
                bail!("the module {name} requires {required}, which the kernel lacks");
            }
        }
        self.order.push(name.to_owned());
        Ok(true)
    }
}

/// Returns the dependencies that a module declares.
fn read_dependencies(module: &[u8]) -> Result<Dependencies> {
    let file = object::File::parse(module).context("the module is not an ELF object")?;
    let section = file.section_by_name(".modinfo");
    let section = section.context("the module has no section .modinfo")?;
    Ok(parse_modinfo(section.data()?))
}

/// Parses the contents of `.modinfo`: entries of the form `key=value`, each terminated by a zero byte.
fn parse_modinfo(modinfo: &[u8]) -> Dependencies {
    let mut dependencies = Dependencies::default();
    for entry in modinfo.split(|&byte| byte == 0) {
        let entry = String::from_utf8_lossy(entry);
        match entry.split_once('=') {
            Some(("depends", names)) => {
                let names = names.split(',').filter(|name| !name.is_empty());
                let names = names.map(|name| name.replace('-', "_"));
                dependencies.required.extend(names);
            }
            Some(("softdep", text)) => dependencies.soft.extend(parse_softdep(text)),
            Some(_) | None => {}
        }
    }
    dependencies
}

/// Returns the names after `pre:` in a string such as `pre: a b post: c`.
fn parse_softdep(text: &str) -> Vec<String> {
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

/// Removes a module's signature, if it has one.
fn strip_signature(mut module: Vec<u8>) -> Result<Vec<u8>> {
    let Some(rest) = module.strip_suffix(SIGNATURE_MARK) else {
        return Ok(module);
    };
    let (rest, metadata) = rest
        .split_last_chunk::<METADATA_LENGTH>()
        .context("the metadata of the signature is incomplete")?;
    let [.., a, b, c, d] = *metadata;
    let signature = usize::try_from(u32::from_be_bytes([a, b, c, d]))?;
    let end = rest.len().checked_sub(signature);
    module.truncate(end.context("the signature is longer than the module")?);
    Ok(module)
}

fn decompress(path: &Path) -> Result<Vec<u8>> {
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
        "{DECOMPRESSOR} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(output.stdout)
}

/// Adds the modules in a directory and its subdirectories.
fn list_modules(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            list_modules(&path, files)?;
        } else if let Some(name) = path.to_str().and_then(module_name) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// Returns the name of the module at the given path, or `None` if this is not the path of a module.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (name, compression) = file.split_once(".ko")?;
    matches!(compression, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

#[cfg(test)]
mod tests;
