//! The constants of the kernel programs, from this kernel's features and the config.

use std::io;

use aya::{EbpfLoader, util::nr_cpus};
use tunnel_common::{flow::Timeouts, fragment::FragmentRecord, steering::Prefix};

use super::{kernel_offsets::KernelOffsets, probe::Features};

/// The program settings that come from the config.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ProgramSettings {
    /// The mark on the daemon's own sockets, which are not translated; 0 if they are not marked.
    pub own_mark: u32,
    /// The steering prefixes, at most one per address family. If there are none, nothing is steered.
    pub prefixes: Vec<Prefix>,
    /// The settings of the programs that translate packets. If `None`, these programs are not loaded.
    pub packets: Option<PacketSettings>,
}

/// The settings of the programs that translate packets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PacketSettings {
    /// The timeouts of idle flows.
    pub timeouts: Timeouts,
    /// The time for which fragments follow the first one of their packet, in seconds.
    pub fragment_timeout: u32,
    /// The first and the last port that may stand for clients.
    pub ports: (u16, u16),
    /// The maximum number of refused packets that are answered each second.
    pub refusals_per_second: u32,
    /// True if packets to cluster IPs are masqueraded whoever sends them.
    pub masquerade_all: bool,
    /// True if there are links on which arriving packets are redirected.
    pub redirect: bool,
}

impl Default for PacketSettings {
    /// Returns the default settings. The ports are below the kernel's range for outgoing connections
    /// (`net.ipv4.ip_local_port_range`), and below Kubernetes' range for node ports.
    fn default() -> Self {
        Self {
            timeouts: Timeouts::DEFAULT,
            fragment_timeout: FragmentRecord::DEFAULT_TIMEOUT,
            ports: (1024, 29_999),
            refusals_per_second: 1000,
            masquerade_all: false,
            redirect: false,
        }
    }
}

impl PacketSettings {
    /// Returns the first of the ports that may stand for clients, and their number.
    fn ports(&self) -> [u32; 2] {
        let (first, last) = self.ports;
        [first.into(), u32::from(last.saturating_sub(first)) + 1]
    }
}

impl ProgramSettings {
    /// Returns the network and mask of the steering prefix for an address family. If the family has none,
    /// returns values that match no address.
    fn network_and_mask(&self, is_v4: bool) -> ([u32; 4], [u32; 4]) {
        let prefix = self.prefixes.iter().find(|prefix| prefix.is_v4() == is_v4);
        prefix.map_or(([u32::MAX; 4], [0; 4]), |prefix| {
            (prefix.network().words(), prefix.mask().words())
        })
    }
}

/// The constant with the length of the link-layer header, and its usual value, in bytes.
const LINK_HEADER: &str = "LINK_HEADER";
const ETHERNET_HEADER: u32 = 14;

/// The constant that is true if there are links on which arriving packets are redirected.
const REDIRECT: &str = "REDIRECT";

/// The programs' constants (globals in the object): the name and bytes of each.
#[derive(Clone, Debug)]
pub struct Globals([(&'static str, Vec<u8>); 17]);

impl Globals {
    /// Returns the constants for this kernel's features and these settings.
    #[must_use]
    pub fn new(features: Features, settings: &ProgramSettings) -> Self {
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (network4, mask4) = settings.network_and_mask(true);
        let guard4 = [network4, mask4].map(|[_, _, _, word]| word);
        let (network6, mask6) = settings.network_and_mask(false);
        let kernel_socket_bit = features.kernel_socket_bit;
        let (byte, bit) = kernel_socket_bit.map_or((0, 0), |it| (it.byte, it.bit));
        let packets = settings.packets.unwrap_or_default();
        Self([
            ("KERN_SOCK_BYTE", bytes(&[byte])),
            ("KERN_SOCK_BIT", vec![bit]),
            ("RETVAL_SETTABLE", vec![u8::from(features.set_retval)]),
            ("COARSE_CLOCK", vec![u8::from(features.coarse_clock)]),
            (
                "KERNEL_OFFSETS",
                bytes(&KernelOffsets::to_constants(features.kernel_offsets)),
            ),
            ("OWN_MARK", bytes(&[settings.own_mark])),
            ("STEERING", vec![u8::from(!settings.prefixes.is_empty())]),
            ("GUARD_V4", bytes(&guard4)),
            ("GUARD_V6", bytes(&[network6, mask6].concat())),
            ("FLOW_TIMEOUTS", bytes(&packets.timeouts.to_words())),
            ("FRAGMENT_TIMEOUT", bytes(&[packets.fragment_timeout])),
            ("MASQUERADE_PORTS", bytes(&packets.ports())),
            ("CPUS", bytes(&[cpus().unwrap_or(1)])),
            ("MASQUERADE_ALL", vec![u8::from(packets.masquerade_all)]),
            (REDIRECT, vec![u8::from(packets.redirect)]),
            ("REFUSALS_PER_SECOND", bytes(&[packets.refusals_per_second])),
            (LINK_HEADER, bytes(&[ETHERNET_HEADER])),
        ])
    }

    /// Returns the same constants for programs on links whose packets have no Ethernet header. Such links redirect nothing.
    #[must_use]
    pub fn without_ethernet(mut self) -> Self {
        for (name, bytes) in &mut self.0 {
            if [LINK_HEADER, REDIRECT].contains(name) {
                bytes.fill(0);
            }
        }
        self
    }

    /// Sets the constants in the object that `loader` is about to load.
    pub fn apply_to<'a>(&'a self, loader: &mut EbpfLoader<'a>) {
        for (name, bytes) in self.by_name() {
            loader.override_global(name, bytes, true);
        }
    }

    /// Returns the name and bytes of each constant.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        self.0.iter().map(|(name, bytes)| (*name, &**bytes))
    }
}

/// Returns the number of CPUs that the kernel may use.
pub(super) fn cpus() -> io::Result<u32> {
    let cpus = nr_cpus().map_err(|(_, source)| source)?;
    u32::try_from(cpus).map_err(io::Error::other)
}
