//! Reads the backends, and the translations that are stored with sockets, to find sockets that still use
//! removed backends.

use std::{io, os::fd::AsFd as _, path::Path};

use tunnel_common::{
    LAYOUT_VERSION,
    lookup::{Lookup, look_up},
    older::OlderFew,
    origin::{Origin, Overflow, OverflowKey},
    service::{Backend, FrontendKey},
    table,
};

use super::{
    data_path,
    map_directories::{Directory, DirectoryRole},
    maps::KernelMaps,
    socket_iterator::SocketIterator,
    sys::{self, MapHandle},
};
use crate::{
    reconcile::{MapReader as _, ReadError},
    sockets::{TranslatedSocket, TranslationMaps},
};

/// An error that can occur when opening the maps that hold sockets' translations.
#[derive(Debug, thiserror::Error)]
pub enum SocketStorageError {
    /// A map can't be opened.
    #[error(transparent)]
    Map(#[from] ReadError),
    /// The kernel has no iterator over socket storage.
    #[error(
        "cannot iterate over sockets: this needs a kernel with /sys/kernel/btf/vmlinux that accepts \
         BPF iterators, and the capabilities CAP_BPF and CAP_PERFMON"
    )]
    Iterator(#[source] io::Error),
}

fn into_io_error(error: ReadError) -> io::Error {
    error.source
}

/// The maps that hold sockets' translations.
pub struct SocketStorage {
    iterator: SocketIterator,
    older_iterator: SocketIterator,
    overflow: MapHandle<OverflowKey, Overflow>,
    maps: KernelMaps,
}

impl SocketStorage {
    /// Opens the pinned maps that are in use.
    ///
    /// # Errors
    ///
    /// Returns an error if the maps do not exist, if this process may not open them, or if the kernel has no
    /// BPF iterators over socket storage.
    pub fn open(bpffs: &Path) -> Result<Self, SocketStorageError> {
        data_path::raise_memory_limit();
        let directory = Directory::new(LAYOUT_VERSION, DirectoryRole::Current);
        let directory = bpffs.join(directory.to_string());
        let (origin, _) = sys::open_map::<u32, Origin>(&directory, &table::ORIGIN)?;
        let (older_few, _) = sys::open_map::<u32, OlderFew>(&directory, &table::OLDER_FEW)?;
        let attach = |map| SocketIterator::attach(map).map_err(SocketStorageError::Iterator);
        Ok(Self {
            overflow: MapHandle::open(&directory, &table::OVERFLOW)?,
            maps: KernelMaps::open(&directory)?,
            iterator: attach(origin.as_fd())?,
            older_iterator: attach(older_few.as_fd())?,
        })
    }
}

impl TranslationMaps for SocketStorage {
    fn sockets(&self, visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>) -> io::Result<()> {
        self.iterator.for_each(visit)
    }

    fn older_translations(
        &self,
        visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
    ) -> io::Result<()> {
        self.older_iterator.for_each(visit)
    }

    fn backend(&self, index: u32) -> io::Result<Option<Backend>> {
        let backends = &self.maps.service_maps.backends;
        if index >= backends.entries() {
            return Ok(None);
        }
        backends.get(&index).map(Some).map_err(into_io_error)
    }

    fn backends(&self) -> io::Result<Vec<Backend>> {
        self.maps
            .backends(self.maps.service_maps.backends.entries())
            .map_err(into_io_error)
    }

    fn owner(&self, frontend: &FrontendKey) -> io::Result<Option<u32>> {
        let index_of = |frontend: &FrontendKey| {
            self.maps
                .service_maps
                .services
                .find(frontend)
                .map_err(into_io_error)
        };
        let record_at = |index| self.maps.frontend(index).map(Some).map_err(into_io_error);
        match look_up(frontend, index_of, record_at)? {
            Lookup::Found((_, record)) => Ok(Some(record.service)),
            Lookup::None => Ok(None),
            Lookup::Unstable => {
                let text =
                    format!("the record of frontend {frontend} kept changing while it was read");
                Err(io::Error::other(text))
            }
        }
    }

    fn overflow(&self, key: &OverflowKey) -> io::Result<Option<Origin>> {
        let found = self.overflow.find(key).map_err(into_io_error)?;
        // The kernel may reuse the element for another key while it is being read.
        let found = found.filter(|overflow| overflow.key == *key);
        Ok(found.map(|overflow| overflow.origin))
    }
}
