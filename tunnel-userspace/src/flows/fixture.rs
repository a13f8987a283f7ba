//! A map of flows in memory.

use std::{collections::HashMap, sync::Mutex};

use tunnel_common::{
    addr::{Address, Port, Protocol},
    flow::{Endpoint, Flow, FlowKey, Role, Seen},
    packet::TcpFlags,
    service::BackendState,
};

use super::{FlowMap, WritableFlowMap};
use crate::reconcile::{ReadError, WriteError};

/// The number of entries in a batch.
const BATCH: usize = 2;

#[derive(Debug)]
pub(super) struct MemoryFlows {
    entries: Mutex<HashMap<FlowKey, Flow>>,
    capacity: u32,
}

impl Default for MemoryFlows {
    fn default() -> Self {
        Self::with_capacity(97)
    }
}

/// Returns what a packet of the backend shows that acknowledges or answers.
pub(super) fn answered() -> Seen {
    Seen::from_backend(TcpFlags::from_byte(0x10))
}

/// Returns what an acknowledgement of the client shows.
pub(super) fn acknowledged() -> Seen {
    Seen::from_client(TcpFlags::from_byte(0x10))
}

pub(super) fn endpoint(text: &str) -> Endpoint {
    let address: std::net::SocketAddr = text.parse().expect("an address and a port");
    Endpoint::new(
        Address::from_ip(address.ip()),
        Port::from_host(address.port()),
    )
}

/// Returns the entry of a flow for packets from the client.
pub(super) fn dialled(client: &str, protocol: Protocol, last_used: u32, seen: Seen) -> Flow {
    Flow {
        client: endpoint(client),
        frontend: endpoint("192.0.2.1:80"),
        backend: endpoint("10.0.0.1:8080"),
        masquerade: Endpoint::NONE,
        backend_index: 0,
        backend_state: BackendState::default(),
        service: 7,
        last_used,
        forwarded_port: endpoint(client).port,
        protocol,
        role: Role::DIALLED,
        seen,
        flags: 0,
        expected: 0,
    }
}

impl MemoryFlows {
    /// Creates a map with a maximum number of entries.
    pub(super) fn with_capacity(capacity: u32) -> Self {
        Self {
            entries: Mutex::default(),
            capacity,
        }
    }

    pub(super) fn insert(&self, flow: Flow) {
        self.entries
            .lock()
            .expect("no panic")
            .insert(flow.key(), flow);
    }

    /// Inserts all entries of a masqueraded flow. The forwarded one has the given activity.
    pub(super) fn insert_all(&self, dialled: Flow, last_used: u32, seen: Seen) {
        let forwarded = Flow {
            role: Role::FORWARDED,
            masquerade: endpoint("192.0.2.9:1024").with_port(dialled.client.port),
            last_used,
            seen,
            ..dialled
        };
        self.insert(dialled);
        self.insert(forwarded);
        self.insert(Flow {
            role: Role::MASQUERADED,
            ..forwarded
        });
    }

    pub(super) fn len(&self) -> usize {
        self.entries.lock().expect("no panic").len()
    }
}

impl FlowMap for MemoryFlows {
    fn capacity(&self) -> u32 {
        self.capacity
    }

    fn read_some(&self, position: Option<u32>) -> Result<(Vec<Flow>, Option<u32>), ReadError> {
        let flows = self.entries.lock().expect("no panic");
        // The positions of entries don't depend on other entries, as in the kernel.
        let position_of = |flow: &Flow| {
            let [client, backend] =
                [flow.client, flow.backend].map(|it| u32::from(it.port.to_host()));
            client * 256 + backend % 64 * 4 + flow.role.number()
        };
        let mut rest: Vec<_> = flows.values().copied().collect();
        rest.retain(|flow| position.is_none_or(|position| position_of(flow) >= position));
        rest.sort_by_key(position_of);
        let next = rest.get(BATCH).map(position_of);
        let some = rest.into_iter().take(BATCH).collect();
        Ok((some, next))
    }

    fn find(&self, key: &FlowKey) -> Result<Option<Flow>, ReadError> {
        Ok(self.entries.lock().expect("no panic").get(key).copied())
    }

    fn remove(&self, key: &FlowKey) -> Result<(), WriteError> {
        self.entries.lock().expect("no panic").remove(key);
        Ok(())
    }
}

impl WritableFlowMap for MemoryFlows {
    fn write(&self, entry: &Flow) -> Result<bool, WriteError> {
        let mut entries = self.entries.lock().expect("no panic");
        let has_room = entries.len() < self.capacity as usize || entries.contains_key(&entry.key());
        if has_room {
            entries.insert(entry.key(), *entry);
        }
        Ok(has_room)
    }
}
