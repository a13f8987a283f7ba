//! Tests that the guard drops packets to the steering prefixes and passes all others.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use anyhow::{Result, ensure};
use tunnel_common::{addr::Address, reason::Reason, steering::Prefix};
use tunnel_tests::node::Node;
use tunnel_userspace::{
    bpf::{self, Counters, DataPath, Guard, PinDirectory, ProgramSettings},
    reconcile::MapSizes,
};

use crate::frame;

const PASS: i32 = -1;
const DROP: i32 = 2;

/// The guard, loaded with a list of steering prefixes.
struct Loaded {
    guard: Guard,
    counters: Counters,
    _pins: PinDirectory,
    _node: Node,
}

fn prefix(text: &str, length: u8) -> Prefix {
    let address = Address::from_ip(text.parse().expect("an address"));
    Prefix::new(address, length).expect("a range")
}

fn load(prefixes: &[Prefix]) -> Result<Loaded> {
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;
    let sizes = MapSizes::uniform(16);
    let switches = ProgramSettings {
        packets: None,
        own_mark: 0,
        prefixes: prefixes.to_vec(),
    };
    let data_path = DataPath::load(&pins, sizes, bpf::probe()?, &switches, Duration::ZERO)?;
    let (_maps, counters) = data_path.open_maps()?;
    Ok(Loaded {
        guard: data_path.guard()?,
        counters,
        _pins: pins,
        _node: node,
    })
}

impl Loaded {
    fn dropped(&self) -> Result<u64> {
        let counts = self.counters.read()?;
        let guarded = counts
            .into_iter()
            .find(|(reason, _)| *reason == Reason::GuardDropped);
        Ok(guarded.map_or(0, |(_, count)| count))
    }

    fn says(&self, to: &str) -> Result<i32> {
        Ok(self.guard.run(&frame::tcp_to(to.parse()?))?)
    }
}

fn usual() -> [Prefix; 2] {
    [prefix("198.19.0.0", 16), prefix("fd00:c01e::", 64)]
}

#[test]
fn a_packet_to_a_steering_prefix_is_dropped_and_counted_and_its_neighbours_pass() -> Result<()> {
    let loaded = load(&usual())?;
    let inside = [
        "198.19.0.0",
        "198.19.0.1",
        "198.19.255.255",
        "fd00:c01e::",
        "fd00:c01e::1",
        "fd00:c01e::ffff:ffff:ffff:ffff",
    ];
    for to in inside {
        ensure!(loaded.says(to)? == DROP, "{to} passes");
    }
    for to in [
        "198.18.255.255",
        "198.20.0.0",
        "10.0.0.1",
        "fd00:c01d:ffff:ffff:ffff::",
        "fd00:c01e:0:1::",
        "::ffff:198.19.0.1",
        "::1",
        "ff02::1",
    ] {
        ensure!(loaded.says(to)? == PASS, "{to} is dropped");
    }
    ensure!(
        loaded.dropped()? == u64::try_from(inside.len())?,
        "{}",
        loaded.dropped()?
    );
    Ok(())
}

#[test]
fn any_address_is_dropped_exactly_if_a_prefix_covers_it() -> Result<()> {
    let sets: [&[Prefix]; 5] = [
        &usual(),
        &[prefix("198.19.0.0", 16)],
        &[prefix("fd00:c01e::", 64)],
        &[prefix("128.0.0.0", 1), prefix("8000::", 1)],
        &[prefix("10.1.2.3", 32), prefix("fd00::3", 128)],
    ];
    for prefixes in sets {
        let loaded = load(prefixes)?;
        for number in 0..2_000_u64 {
            let to = address(prefixes, number);
            let is_inside = prefixes.iter().any(|prefix| covers(prefix, to));
            let verdict = loaded.guard.run(&frame::tcp_to(to))?;
            ensure!(
                verdict == if is_inside { DROP } else { PASS },
                "{to} of {prefixes:?}: {verdict}"
            );
        }
    }
    Ok(())
}

/// Returns an address in or near one of the prefixes, or an arbitrary IPv6 address. Depends only on the
/// prefixes and on `number`.
fn address(prefixes: &[Prefix], number: u64) -> IpAddr {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = u128::from(mixed) << 64 | u128::from(mixed.rotate_left(29));
    let Some(prefix) = prefixes.get(usize::from(number.to_le_bytes()[0]) % (prefixes.len() + 1))
    else {
        return Ipv6Addr::from_bits(bits).into();
    };
    match prefix.network().to_ip() {
        // Change some of the host bits, and at most one further bit anywhere in the address.
        IpAddr::V4(network) => {
            let [a, b, c, d, ..] = mixed.to_le_bytes();
            let flip = 1_u32.checked_shl(u32::from(a) % 40).unwrap_or(0);
            Ipv4Addr::from_bits(
                network.to_bits() ^ flip ^ u32::from_le_bytes([b, c, 0, 0]) ^ u32::from(d),
            )
            .into()
        }
        IpAddr::V6(network) => {
            let flip = 1_u128
                .checked_shl(u32::from(mixed.to_le_bytes()[0]) % 160)
                .unwrap_or(0);
            Ipv6Addr::from_bits(network.to_bits() ^ flip ^ (bits >> 70)).into()
        }
    }
}

/// Returns true if the prefix and the address are in the same family and the prefix contains the address.
fn covers(prefix: &Prefix, to: IpAddr) -> bool {
    let length = u32::from(prefix.length());
    match (prefix.network().to_ip(), to) {
        (IpAddr::V4(network), IpAddr::V4(to)) => {
            (network.to_bits() ^ to.to_bits()).leading_zeros() >= length
        }
        (IpAddr::V6(network), IpAddr::V6(to)) => {
            (network.to_bits() ^ to.to_bits()).leading_zeros() >= length
        }
        _ => false,
    }
}

#[test]
fn ip_options_do_not_hide_the_destination() -> Result<()> {
    let loaded = load(&usual())?;
    let options = [1; 40];

    let frame = frame::v4_to(Ipv4Addr::new(198, 19, 0, 1), &options);
    ensure!(
        loaded.guard.run(&frame)? == DROP,
        "a packet to the prefix passes"
    );
    let frame = frame::v4_to(Ipv4Addr::new(192, 0, 2, 1), &options);
    ensure!(
        loaded.guard.run(&frame)? == PASS,
        "a packet to another address is dropped"
    );
    Ok(())
}

#[test]
fn vlan_tags_do_not_hide_the_destination() -> Result<()> {
    let loaded = load(&usual())?;
    let tagged = |tags: usize, to: &str| -> Result<Vec<u8>> {
        let plain = frame::tcp_to(to.parse()?);
        let (ethernet, rest) = plain.split_at(12);
        // Tags for VLAN 0, alternately 802.1Q and 802.1ad. The kernel removes such tags.
        let tag = |number: usize| [[0x81, 0, 0, 0], [0x88, 0xa8, 0, 0]][number % 2];
        let tags: Vec<u8> = (0..tags).flat_map(tag).collect();
        Ok([ethernet, &tags, rest].concat())
    };
    for tags in 1..=8 {
        for to in ["198.19.0.1", "fd00:c01e::1"] {
            ensure!(
                loaded.guard.run(&tagged(tags, to)?)? == DROP,
                "{to} behind {tags} tags"
            );
        }
        for to in ["192.0.2.1", "2001:db8::1"] {
            ensure!(
                loaded.guard.run(&tagged(tags, to)?)? == PASS,
                "{to} behind {tags} tags"
            );
        }
    }
    ensure!(
        loaded.guard.run(&tagged(9, "192.0.2.1")?)? == DROP,
        "a packet behind nine tags passes"
    );
    Ok(())
}

#[test]
fn frames_without_an_ip_packet_pass() -> Result<()> {
    let loaded = load(&usual())?;
    let steered = frame::v4_to(Ipv4Addr::new(198, 19, 0, 1), &[]);
    let payload = steered.get(14..).unwrap_or_default();

    // The EtherTypes of ARP and PPPoE, and a local experimental one. Each frame's payload is an IPv4 packet.
    for protocol in [0x0806, 0x8864, 0x88b5] {
        let frame = [&*frame::ethernet(protocol), payload].concat();
        ensure!(loaded.guard.run(&frame)? == PASS, "{protocol:#x}");
    }
    ensure!(loaded.dropped()? == 0, "{}", loaded.dropped()?);
    Ok(())
}

#[test]
fn without_prefixes_nothing_is_dropped() -> Result<()> {
    let loaded = load(&[])?;

    for to in [
        "0.0.0.0",
        "255.255.255.255",
        "198.19.0.1",
        "::",
        "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    ] {
        ensure!(loaded.says(to)? == PASS, "{to} is dropped");
    }
    Ok(())
}
