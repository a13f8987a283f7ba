//! Reads the stored translations of sockets and the backends, to find sockets of removed backends.

use std::{io, os::fd::AsFd as _, path::Path};

use tunnel_common::{
    LAYOUT_VERSION,
    lookup::{Lookup, look_up},
    origin::{Origin, Overflow, OverflowKey},
    service::{Backend, FrontendKey},
    table,
};

use super::{
    map_folders::{Folder, FolderRole},
    socket_iterator::SocketIterator,
    data_path,
    maps::KernelMaps,
    sys::{self, MapHandle},
};
use crate::{
    reconcile::{MapReader as _, ReadError},
    sockets::{TranslationMaps, TranslatedSocket},
};

/// The error of reading the translations of sockets.
#[derive(Debug, thiserror::Error)]
pub enum SocketMemoryError {
    /// A map can't be opened.
    #[error(transparent)]
    Map(#[from] ReadError),
    /// The kernel offers no iterator.
    #[error(
        "cannot iterate over sockets: this needs a kernel with BPF iterators and with \
         /sys/kernel/btf/vmlinux, and the capabilities CAP_BPF and CAP_PERFMON"
    )]
    Iterator(#[source] io::Error),
}

fn cause(error: ReadError) -> io::Error {
    error.source
}

/// The maps with the translations of sockets.
pub struct SocketMemory {
    iterator: SocketIterator,
    overflow: MapHandle<OverflowKey, Overflow>,
    maps: KernelMaps,
}

impl SocketMemory {
    /// Opens the maps that are in use, by their pins.
    ///
    /// # Errors
    ///
    /// The maps do not exist, this process may not open them, or the kernel has no BPF iterators over socket
    /// storage.
    pub fn open(bpffs: &Path) -> Result<Self, SocketMemoryError> {
        data_path::raise_memory_limit();
        let folder = Folder::new(LAYOUT_VERSION, FolderRole::Current);
        let folder = bpffs.join(folder.to_string());
        let (origin, _) = sys::open_map::<u32, Origin>(&folder, &table::ORIGIN)?;
        Ok(Self {
            overflow: MapHandle::open(&folder, &table::OVERFLOW)?,
            maps: KernelMaps::open(&folder)?,
            iterator: SocketIterator::attach(origin.as_fd()).map_err(SocketMemoryError::Iterator)?,
        })
    }
}

impl TranslationMaps for SocketMemory {
    fn sockets(&self, visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>) -> io::Result<()> {
        self.iterator.for_each(visit)
    }

    fn backend(&self, index: u32) -> io::Result<Option<Backend>> {
        let backends = &self.maps.services.be;
        if index >= backends.entries() {
            return Ok(None);
        }
        backends.get(&index).map(Some).map_err(cause)
    }

    fn backends(&self) -> io::Result<Vec<Backend>> {
        self.maps
            .backends(self.maps.services.be.entries())
            .map_err(cause)
    }

    fn owner(&self, front: &FrontendKey) -> io::Result<Option<u32>> {
        let index_of = |front: &FrontendKey| self.maps.services.svc.find(front).map_err(cause);
        let record_at = |index| self.maps.frontend(index).map(Some).map_err(cause);
        match look_up(front, index_of, record_at)? {
            Lookup::Found((_, record)) => Ok(Some(record.service)),
            Lookup::None => Ok(None),
            Lookup::Unstable => {
                let text = format!("the record of frontend {front} kept changing while it was read");
                Err(io::Error::other(text))
            }
        }
    }

    fn older_translation(&self, key: &OverflowKey) -> io::Result<Option<Origin>> {
        let found = self.overflow.find(key).map_err(cause)?;
        // The kernel may reuse the element for another key while it is read.
        let found = found.filter(|overflow| overflow.key == *key);
        Ok(found.map(|overflow| overflow.origin))
    }
}
