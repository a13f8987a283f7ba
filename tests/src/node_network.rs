//! A node's network: the host, the pods and an external client, which are connected by veth pairs and routes.
//!
//! ```text
//! pod 10.1.0.N ──eth0──podN─┐
//!     fd00:10:1::N          ├─ host ─uplink──eth0─ outside 192.0.2.2
//! pod …        ──eth0──podM─┘  192.0.2.1              2001:db8::2
//!                              2001:db8::1
//! ```
//!
//! Service addresses are unreachable from every sandbox, so a connection that isn't translated fails at once,
//! before any packet is sent.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result};

use crate::{cgroup, executor::SandboxSpec, lab::Lab, pod::Pod, sandbox::Sandbox};

/// The host's IPv4 address on its uplink.
pub const HOST_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// The host's IPv6 address on its uplink.
pub const HOST_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
/// The external client's IPv4 address.
pub const OUTSIDE_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// The external client's IPv6 address.
pub const OUTSIDE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);
/// The address ranges that contain the Services' ClusterIPs.
pub const SERVICE_RANGES: [&str; 2] = ["10.96.0.0/12", "fd00:10:96::/108"];
/// The address ranges that contain the pods' addresses.
pub const POD_RANGES: [&str; 2] = ["10.1.0.0/24", "fd00:10:1::/64"];

/// Sysctls for every network namespace. Duplicate address detection is disabled, so that new addresses work
/// at once. TCP timestamps have no random offset per address pair: the same pair of ports may be reused
/// through another Service address, and the kernel drops a SYN to a socket in `TIME_WAIT` if the timestamp
/// goes backwards. ICMP errors are not rate-limited, so that every misrouted attempt fails at once.
const SYSCTLS: [(&str, &str); 7] = [
    ("net.ipv6.conf.all.disable_ipv6", "0"),
    ("net.ipv6.conf.default.accept_dad", "0"),
    ("net.ipv6.conf.default.accept_ra", "0"),
    ("net.ipv4.tcp_timestamps", "2"),
    ("net.ipv4.ip_local_port_range", "10240 65001"),
    ("net.ipv4.icmp_ratelimit", "0"),
    ("net.ipv6.icmp.ratelimit", "0"),
];

/// Additional sysctls for the host's network namespace.
const HOST_SYSCTLS: [(&str, &str); 3] = [
    ("net.ipv4.ip_forward", "1"),
    ("net.ipv6.conf.all.forwarding", "1"),
    ("net.ipv4.conf.all.send_redirects", "0"),
];

/// The addresses of the pods' default gateway. All of the host's interfaces to pods have the same ones.
const POD_GATEWAY: [&str; 2] = ["169.254.1.1", "fe80::1"];

/// The sandboxes of a node's network. They are removed on drop.
#[derive(Debug)]
pub struct NodeNetwork {
    pods: Mutex<Vec<Arc<Pod>>>,
    outside: Sandbox,
    host: Sandbox,
    lab: Lab,
}

impl NodeNetwork {
    /// Creates a host and an external client.
    pub fn new() -> Result<Self> {
        let lab = Lab::new()?;
        let bpffs = Some(lab.directory().join("bpffs"));
        let outside = Sandbox::with_new_network(lab.cgroup().join("outside"), None, &SYSCTLS);
        let host_sysctls = [&SYSCTLS[..], &HOST_SYSCTLS].concat();
        let host =
            Sandbox::with_new_network(lab.cgroup().join("instance/host"), bpffs, &host_sysctls);
        let network = Self {
            pods: Mutex::default(),
            outside: outside.context("cannot create the sandbox outside")?,
            host: host.context("cannot create the sandbox of the host")?,
            lab,
        };
        network.connect_outside()?;
        Ok(network)
    }

    /// Returns the host's sandbox, which is in the instance's cgroup.
    #[must_use]
    pub const fn host(&self) -> &Sandbox {
        &self.host
    }

    /// Returns the external client's sandbox, which is not in the instance's cgroup.
    #[must_use]
    pub const fn outside(&self) -> &Sandbox {
        &self.outside
    }

    /// Returns the lab, whose directory and cgroup contain everything created for this node.
    #[must_use]
    pub const fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Returns the cgroup that contains the host and the pods, but not the external client.
    #[must_use]
    pub fn instance_cgroup(&self) -> PathBuf {
        self.lab.cgroup().join("instance")
    }

    /// Returns the pod with the given name. Creates it on first use.
    pub fn pod(&self, name: &str) -> Result<Arc<Pod>> {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pod) = pods.iter().find(|pod| pod.name() == name) {
            return Ok(Arc::clone(pod));
        }
        let number = u8::try_from(pods.len() + 1).context("too many pods")?;
        let pod = self
            .create_pod(name, number)
            .with_context(|| format!("pod {name}"))?;
        let pod = Arc::new(pod);
        pods.push(Arc::clone(&pod));
        Ok(pod)
    }

    /// Creates a sandbox that shares another sandbox's network namespace but has its own cgroup.
    pub fn share_namespace(
        &self,
        other: &Sandbox,
        cgroup: &str,
        bpffs: Option<PathBuf>,
    ) -> Result<Sandbox> {
        let cgroup = self.lab.cgroup().join(cgroup);
        cgroup::create(&cgroup)?;
        Sandbox::new(&SandboxSpec {
            network_of: Some(other.pid()),
            user: None,
            cgroup,
            bpffs,
        })
    }

    /// Creates a sandbox in the instance's cgroup. An unprivileged user owns its network namespace, which has no
    /// links except loopback, and is root in its user namespace.
    pub fn create_in_user_namespace(&self, name: &str, user: u32) -> Result<Sandbox> {
        Sandbox::in_user_namespace(self.instance_cgroup().join(name), user)
    }

    /// Creates a sandbox with a new network namespace, which has no links yet. Its cgroup is outside the
    /// instance's.
    pub fn create_unconnected(&self, name: &str) -> Result<Sandbox> {
        Sandbox::with_new_network(self.lab.cgroup().join(name), None, &SYSCTLS)
    }

    fn connect_outside(&self) -> Result<()> {
        let outside = self.outside.pid();
        let base = base_commands();
        self.host.ip(&format!(
            "{base}\
                 link add uplink type veth peer name eth0 netns {outside}\n\
                 link set uplink up\n\
                 addr add {HOST_V4}/24 dev uplink\n\
                 addr add {HOST_V6}/64 dev uplink nodad\n\
                 route add default via {OUTSIDE_V4}\n\
                 route add default via {OUTSIDE_V6}\n"
        ))?;
        self.outside.ip(&format!(
            "{base}\
                 link set eth0 up\n\
                 addr add {OUTSIDE_V4}/24 dev eth0\n\
                 addr add {OUTSIDE_V6}/64 dev eth0 nodad\n\
                 route add default via {HOST_V4}\n\
                 route add default via {HOST_V6}\n"
        ))
    }

    fn create_pod(&self, name: &str, number: u8) -> Result<Pod> {
        let cgroup = self.instance_cgroup().join("pods").join(name);
        let sandbox = Sandbox::with_new_network(cgroup, None, &SYSCTLS)?;
        let pod = Pod::new(name, sandbox, number, self.lab.directory().to_owned());
        let (v4, v6, pid) = (pod.v4(), pod.v6(), pod.pid());
        let [gateway4, gateway6] = POD_GATEWAY;
        let base = base_commands();
        self.host.ip(&format!(
            "link add pod{number} type veth peer name eth0 netns {pid}\n\
                 link set pod{number} up\n\
                 addr add {gateway4}/32 dev pod{number} scope link\n\
                 addr add {gateway6}/64 dev pod{number} nodad\n\
                 route add {v4}/32 dev pod{number} src {HOST_V4}\n\
                 route add {v6}/128 dev pod{number} src {HOST_V6}\n"
        ))?;
        pod.ip(&format!(
            "{base}\
                 link set eth0 up\n\
                 addr add {v4}/32 dev eth0\n\
                 addr add {v6}/128 dev eth0 nodad\n\
                 route add {gateway4}/32 dev eth0\n\
                 route add default via {gateway4} dev eth0\n\
                 route add default via {gateway6} dev eth0\n"
        ))?;
        Ok(pod)
    }

    /// Returns the shell commands that enter the sandboxes, one per line.
    #[must_use]
    pub fn enter_commands(&self) -> String {
        let command = |name: &str, pid: u32, group: &str| {
            let cgroup = self.lab.cgroup().join(group);
            format!(
                "  {name:<12} sh -c 'echo $$ > {}/cgroup.procs; exec nsenter -t {pid} -n -m sh'\n",
                cgroup.display()
            )
        };
        let mut text = command("host", self.host.pid(), "instance/host");
        let pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        for pod in pods.iter() {
            let group = format!("instance/pods/{}", pod.name());
            text.push_str(&command(pod.name(), pod.pid(), &group));
        }
        drop(pods);
        text + &command("outside", self.outside.pid(), "outside")
    }
}

/// Returns the commands to run first in every network namespace. They bring up loopback and make Service
/// addresses unreachable.
fn base_commands() -> String {
    let [v4, v6] = SERVICE_RANGES;
    format!("link set lo up\nroute add unreachable {v4}\nroute add unreachable {v6}\n")
}

/// Returns the addresses of pod number `number`.
pub(crate) fn pod_addresses(number: u8) -> [IpAddr; 2] {
    let v4 = Ipv4Addr::new(10, 1, 0, number);
    let v6 = Ipv6Addr::new(0xfd00, 0x10, 1, 0, 0, 0, 0, u16::from(number));
    [v4.into(), v6.into()]
}
