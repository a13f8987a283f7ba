//! A node with a Service that has one backend, whose programs run on single packets.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    flow::Endpoint,
    service::{Backend, BackendState, Frontend, FrontendKey, IndexRange, Membership, Slot},
};
use tunnel_userspace::{
    net::{AddressPair, PacketPrograms as _, TranslatedLink},
    reconcile::MapWriter as _,
};
use zerocopy::FromZeros as _;

use crate::{
    segment::{ACK, SYN, ends, expect_correct, segment},
    translation::{LOOPBACK, Loaded, PASS, load},
};

/// The place of the backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    ThisNode,
    /// This node, behind a link of pods that has the programs (`service.packets.links: all`).
    PodLink,
    OtherNode,
}

impl Place {
    pub(crate) const ALL: [Self; 3] = [Self::ThisNode, Self::PodLink, Self::OtherNode];

    /// Returns true if packets pass both programs, and the backend sees the client as the node.
    pub(crate) fn is_masqueraded(self) -> bool {
        self != Self::ThisNode
    }
}

/// A flow from a client outside to a backend.
pub(crate) struct Flow {
    pub(crate) client: Endpoint,
    pub(crate) frontend: Endpoint,
    pub(crate) backend: Endpoint,
    pub(crate) protocol: Protocol,
    pub(crate) place: Place,
    /// The client as the backend sees it: as the node, unless the backend is behind a link without the programs.
    pub(crate) seen: Endpoint,
}

fn endpoint(text: &str) -> Result<Endpoint> {
    let at: SocketAddr = text.parse()?;
    Ok(Endpoint::new(
        Address::from_ip(at.ip()),
        Port::from_host(at.port()),
    ))
}

/// A node with a Service in each family and for each protocol.
pub(crate) struct Node {
    pub(crate) loaded: Loaded,
}

impl Node {
    /// Creates a node whose backends are behind a link without the programs, or on another node.
    pub(crate) fn new() -> Result<Self> {
        Self::with_link(false)
    }

    /// Creates a node for a backend at a place.
    pub(crate) fn of(place: Place) -> Result<Self> {
        Self::with_link(place == Place::PodLink)
    }

    fn with_link(leads_to_pods: bool) -> Result<Self> {
        let mut loaded = load()?;
        let mut index = 0;
        for (frontend, backend) in [
            ("198.51.100.7:80", "10.244.1.5:8080"),
            ("[2001:db8:7::7]:80", "[fd00::5]:8080"),
        ] {
            for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
                program(
                    &mut loaded,
                    index,
                    (endpoint(frontend)?, endpoint(backend)?),
                    protocol,
                )?;
                index += 1;
            }
        }
        let addresses = AddressPair {
            v4: Some("192.0.2.10".parse()?),
            v6: Some("2001:db8:2::10".parse()?),
        };
        let translation = &mut loaded.translation;
        let link = TranslatedLink {
            addresses,
            leads_to_pods,
            ..TranslatedLink::default()
        };
        translation.set_links(&BTreeMap::from([(LOOPBACK, link)]))?;
        Ok(Self { loaded })
    }

    /// Begins a flow to the Service.
    pub(crate) fn begin(&self, is_v4: bool, protocol: Protocol, place: Place) -> Result<Flow> {
        let [client, frontend] = if is_v4 {
            ["203.0.113.9:40000", "198.51.100.7:80"]
        } else {
            ["[2001:db8::9]:40000", "[2001:db8:7::7]:80"]
        };
        let (client, frontend) = (endpoint(client)?, endpoint(frontend)?);
        let first = segment(client, frontend, protocol, (SYN, b"hello"))?;
        let frame = self.pass(&first, place.is_masqueraded())?;
        let (seen, backend) = ends(&frame)?;
        ensure!(backend != frontend, "not translated");
        ensure!((seen.address != client.address) == place.is_masqueraded());
        Ok(Flow {
            client,
            frontend,
            backend,
            protocol,
            place,
            seen,
        })
    }

    /// Sends a frame through tc ingress and, if it leaves again, through tc egress. Returns the frame afterwards.
    pub(crate) fn pass(&self, frame: &[u8], leaves: bool) -> Result<Vec<u8>> {
        let translation = &self.loaded.translation;
        let mut run = translation.arrive(frame)?;
        ensure!(run.verdict == PASS, "dropped at ingress: {}", run.verdict);
        if leaves {
            run = translation.leave(&run.frame)?;
            ensure!(run.verdict == PASS, "dropped at egress: {}", run.verdict);
        }
        Ok(run.frame)
    }
}

impl Flow {
    /// Returns a frame of the client as the backend gets it.
    pub(crate) fn request(&self) -> Result<Vec<u8>> {
        segment(self.seen, self.backend, self.protocol, (ACK, b"a request"))
    }

    /// Returns a frame of the backend as the client gets it.
    pub(crate) fn reply(&self) -> Result<Vec<u8>> {
        segment(self.frontend, self.client, self.protocol, (ACK, b"a reply"))
    }

    /// Asserts that the packets of the flow still pass.
    pub(crate) fn expect_alive(&self, node: &Node) -> Result<()> {
        let content = (ACK, &b"more"[..]);
        let sent = segment(self.client, self.frontend, self.protocol, content)?;
        let frame = node.pass(&sent, self.place.is_masqueraded())?;
        expect_correct(&frame)?;
        ensure!(ends(&frame)? == (self.seen, self.backend), "a request");
        Ok(())
    }
}

/// Programs a Service with one backend.
fn program(
    loaded: &mut Loaded,
    index: u32,
    (frontend, backend): (Endpoint, Endpoint),
    protocol: Protocol,
) -> Result<()> {
    let maps = &mut loaded.maps;
    let key = FrontendKey::new(frontend.address, frontend.port, protocol);
    let set = IndexRange {
        base: index,
        len: 1,
    };
    let backend = Backend {
        address: backend.address,
        port: backend.port,
        protocol,
        flags: 0,
        service: index,
        state: BackendState::default().next_generation(),
        sets: Membership::CLUSTER,
    };
    maps.write_backends(&[(index, backend)]).1?;
    let slot = Slot {
        backend: index,
        share: 1,
    };
    maps.write_slots(index, &[slot])?;
    let record = Frontend {
        key,
        service: index,
        cluster: set,
        local: set,
        packet_flags: Frontend::MASQUERADE,
        flags: Frontend::PACKETS_LOCAL,
        ..Frontend::new_zeroed()
    };
    maps.write_frontend(index, &record)?;
    maps.write_frontend_key(&key, index)
        .with_context(|| format!("frontend {index}"))
}
