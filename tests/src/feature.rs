//! Kernel features that some tests need and not every kernel has. A test whose features are missing is
//! recorded as skipped, so that it isn't counted as passed.

use std::{
    collections::BTreeMap,
    fmt::{self, Display},
    fs,
    io::Write as _,
    process::Command,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    libc,
    sched::{CloneFlags, unshare},
};
use socket2::{Domain, Protocol, Socket, Type};
use tunnel_userspace::bpf;

use crate::{environment, ipvs, log, nfs};

/// A feature that a kernel may lack.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Feature {
    /// tcx links for tc programs (Linux 6.6).
    Tcx,
    /// `bpf_set_retval` in socket hooks (Linux 6.1).
    SetRetval,
    Sctp,
    /// Network interfaces of type `dummy`.
    Dummy,
    /// Network interfaces of type `vlan`.
    Vlan,
    /// Network interfaces of type `bond`.
    Bond,
    /// Network interfaces of type `vxlan`.
    Vxlan,
    /// Network interfaces of type `macvlan`.
    Macvlan,
    /// Network interfaces of type `sit`, which tunnel IPv4 and IPv6 over IPv4.
    Sit,
    /// Network interfaces of type `wireguard`.
    Wireguard,
    IpVs,
    /// The kernel's NFS server and client.
    Nfs,
    /// A limit on socket option memory, `net.core.optmem_max`, that is separate for each network namespace
    /// (Linux 6.12).
    OwnOptmem,
    /// Multipath TCP (Linux 5.6, if enabled in the kernel config).
    Mptcp,
    /// BPF iterators over socket storage (Linux 5.9, with BTF). Some kernels of virtual machines reject all
    /// programs of type tracing.
    SocketIterator,
}

impl Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcx => "tcx",
            Self::SetRetval => "set_retval",
            Self::Sctp => "sctp",
            Self::Dummy => "dummy",
            Self::Vlan => "vlan",
            Self::Bond => "bond",
            Self::Vxlan => "vxlan",
            Self::Macvlan => "macvlan",
            Self::Sit => "sit",
            Self::Wireguard => "wireguard",
            Self::IpVs => "ipvs",
            Self::Nfs => "nfs",
            Self::OwnOptmem => "own_optmem",
            Self::Mptcp => "mptcp",
            Self::SocketIterator => "socket_iterator",
        })
    }
}

/// Returns true if the kernel has the feature. Each feature is probed once per process.
pub fn is_supported(feature: Feature) -> Result<bool> {
    static KNOWN: Mutex<BTreeMap<Feature, bool>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known.get(&feature) {
        return Ok(*known);
    }
    let is_present =
        probe(feature).with_context(|| format!("cannot probe the kernel feature {feature}"))?;
    known.insert(feature, is_present);
    Ok(is_present)
}

fn probe(feature: Feature) -> Result<bool> {
    match feature {
        Feature::Tcx => Ok(bpf::probe()?.tcx),
        Feature::SetRetval => Ok(bpf::probe()?.set_retval),
        Feature::Sctp => can_create_socket(Protocol::SCTP),
        Feature::Dummy => can_create_link("type dummy"),
        Feature::Vlan => can_create_link("link base type vlan id 5"),
        Feature::Bond => can_create_link("type bond"),
        Feature::Vxlan => can_create_link("type vxlan id 5 dstport 4789 remote 192.0.2.1 dev lo"),
        Feature::Macvlan => can_create_link("link base type macvlan mode bridge"),
        Feature::Sit => can_create_link("type sit remote 192.0.2.1"),
        Feature::Wireguard => can_create_link("type wireguard"),
        Feature::IpVs => ipvs::is_supported(),
        Feature::Nfs => Ok(nfs::is_supported()?),
        Feature::OwnOptmem => in_new_network(|| Ok(fs::exists("/proc/sys/net/core/optmem_max")?)),
        Feature::Mptcp => can_create_socket(Protocol::MPTCP),
        Feature::SocketIterator => Ok(bpf::supports_socket_iterator()?),
    }
}

/// Runs `body` on a new thread in a new network namespace.
fn in_new_network<T: Send + 'static>(
    body: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        body()
    });
    thread
        .join()
        .map_err(|_panic| anyhow::anyhow!("the thread in a new network namespace panicked"))?
}

/// Returns true if the kernel can create stream sockets that use the given protocol.
fn can_create_socket(protocol: Protocol) -> Result<bool> {
    match Socket::new(Domain::IPV4, Type::STREAM, Some(protocol)) {
        Ok(_socket) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EPROTONOSUPPORT | libc::ESOCKTNOSUPPORT | libc::ENOPROTOOPT) => Ok(false),
            _ => Err(error.into()),
        },
    }
}

/// Returns true if the kernel can create a link, which is described as in the arguments of `ip link add`. It may be on top of
/// the link `base`.
fn can_create_link(description: &'static str) -> Result<bool> {
    let output = in_new_network(move || {
        let add = |arguments: &str| {
            let mut ip = Command::new("ip");
            let output = ip.args(["link", "add"]).args(arguments.split(' ')).output();
            output.context("cannot run ip")
        };
        let base = add("base type veth peer name peer")?;
        ensure!(base.status.success(), "cannot create a veth link");
        add(&format!("probe {description}"))
    })?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(true)
    } else if stderr.contains("Unknown device type") || stderr.contains("not supported") {
        Ok(false)
    } else {
        anyhow::bail!("ip: {stderr}")
    }
}

/// Returns true if the kernel lacks a feature that the test needs. In that case, also appends the names of
/// the test and the feature to the file set in `CULVERT_SKIPS`, if any.
pub fn lacks(test: &str, needed: &[Feature]) -> Result<bool> {
    for feature in needed {
        if !is_supported(*feature)? {
            record_skip(test, *feature)?;
            return Ok(true);
        }
    }
    Ok(false)
}

#[expect(
    clippy::print_stdout,
    reason = "the output of a test run shows skipped tests"
)]
fn record_skip(test: &str, feature: Feature) -> Result<()> {
    println!("{test} is skipped: this kernel has no {feature}");
    let Some(path) = environment::skips() else {
        return Ok(());
    };
    let mut file = log::append(&path)?;
    // The line is written with a single write, since other processes append to the same file.
    file.write_all(format!("{test} {feature}\n").as_bytes())?;
    Ok(())
}

/// Returns the name of the enclosing test as libtest prints it, that is, without the crate name.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::feature::name_of(std::any::type_name_of_val(&here))
    }};
}

/// Derives a test's name from the path of a function that is declared inside the test.
#[must_use]
pub fn name_of(inner: &str) -> &str {
    let inside = inner.split_once("::").map_or(inner, |(_, inside)| inside);
    let test = inside.strip_suffix("::here").unwrap_or(inside);
    test.trim_end_matches("::{{closure}}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_test_is_named_as_libtest_names_it() {
        assert_eq!(
            crate::test_name!(),
            "feature::tests::a_test_is_named_as_libtest_names_it"
        );
        let inside = || crate::test_name!();
        assert_eq!(inside(), crate::test_name!());
    }
}
