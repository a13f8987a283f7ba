//! Typed access to a pinned map that is listed in the table.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd as _, OwnedFd},
    path::Path,
    ptr,
    sync::Arc,
};

use tunnel_common::table::Map;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Attr, BPF_MAP_UPDATE_ELEM, check_map, open_map};
use crate::reconcile::{ReadError, WriteError};

const BPF_MAP_LOOKUP_ELEM: i64 = 1;
const BPF_MAP_DELETE_ELEM: i64 = 3;
const BPF_MAP_GET_NEXT_KEY: i64 = 4;

const BPF_MAP_LOOKUP_BATCH: i64 = 24;
const BPF_MAP_UPDATE_BATCH: i64 = 26;

/// A type that consists of plain bytes, which the kernel may read and write.
pub(in crate::bpf) trait Plain: Copy + FromBytes + Immutable + IntoBytes {}

impl<T: Copy + FromBytes + Immutable + IntoBytes> Plain for T {}

/// An open map. Its type, its flags, and the sizes of its keys and values were checked when it was opened.
#[derive(Debug)]
pub(in crate::bpf) struct MapHandle<K, V> {
    row: &'static Map,
    fd: Arc<OwnedFd>,
    entries: u32,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K, V> Clone for MapHandle<K, V> {
    fn clone(&self) -> Self {
        Self {
            fd: Arc::clone(&self.fd),
            ..*self
        }
    }
}

impl<K: Plain, V: Plain> MapHandle<K, V> {
    /// Opens the map that a row of the table describes, through its pin in a directory.
    pub(in crate::bpf) fn open(directory: &Path, row: &'static Map) -> Result<Self, ReadError> {
        let (fd, entries) = open_map::<K, V>(directory, row)?;
        Ok(Self {
            row,
            fd: Arc::new(fd),
            entries,
            types: PhantomData,
        })
    }

    /// Uses a map that is already open, if it is the map that a row of the table describes.
    pub(in crate::bpf) fn of_map(fd: OwnedFd, row: &'static Map) -> Result<Self, ReadError> {
        let entries = check_map::<K, V>(fd.as_fd(), row).map_err(|source| ReadError {
            map: row.name,
            source,
        })?;
        Ok(Self {
            row,
            fd: Arc::new(fd),
            entries,
            types: PhantomData,
        })
    }

    /// Returns the maximum number of entries in the map.
    pub(in crate::bpf) const fn entries(&self) -> u32 {
        self.entries
    }

    /// Reads the value for a key; returns `None` if the key does not exist.
    pub(in crate::bpf) fn find(&self, key: &K) -> Result<Option<V>, ReadError> {
        let mut value = V::new_zeroed();
        let mut attr = self.key_attr(key).pointer(16, &raw mut value);
        // SAFETY: key and value have the map's key and value sizes, and outlive the call.
        let result = unsafe { attr.call(BPF_MAP_LOOKUP_ELEM) };
        Ok(self.is_found(result)?.then_some(value))
    }

    /// Reads the value for a key that must exist.
    pub(in crate::bpf) fn get(&self, key: &K) -> Result<V, ReadError> {
        let found = self.find(key)?;
        found.ok_or_else(|| self.read_error(io::ErrorKind::NotFound.into()))
    }

    /// Reads all entries in a hash map.
    pub(in crate::bpf) fn read_all(&self) -> Result<Vec<(K, V)>, ReadError> {
        let mut found = Vec::new();
        let mut last = None;
        // The loop ends after the last key.
        while let Some(key) = self.key_after(last.as_ref())? {
            found.extend(self.find(&key)?.map(|value| (key, value)));
            last = Some(key);
        }
        Ok(found)
    }

    fn key_after(&self, last: Option<&K>) -> Result<Option<K>, ReadError> {
        let mut next = K::new_zeroed();
        let mut attr = Attr::new()
            .fd(0, self.fd.as_fd())
            .pointer(8, last.map_or(ptr::null(), ptr::from_ref))
            .pointer(16, &raw mut next);
        // SAFETY: both keys have the map's key size, and outlive the call; the first may be null.
        let result = unsafe { attr.call(BPF_MAP_GET_NEXT_KEY) };
        Ok(self.is_found(result)?.then_some(next))
    }

    /// Reads up to `count` values in a hash with one system call, beginning at a position that an earlier call has returned.
    /// Also returns the next position, or `None` after the last value.
    pub(in crate::bpf) fn read_batch(
        &self,
        position: Option<u32>,
        count: u32,
    ) -> Result<(Vec<V>, Option<u32>), ReadError> {
        let length =
            usize::try_from(count).map_err(|error| self.read_error(io::Error::other(error)))?;
        let (mut keys, mut values) = (vec![K::new_zeroed(); length], vec![V::new_zeroed(); length]);
        // In a hash, a position is the number of a bucket (`__htab_map_lookup_and_delete_batch` in
        // kernel/bpf/hashtab.c).
        let (from, mut next) = (position.unwrap_or(0), 0_u32);
        let from = position.map_or(ptr::null(), |_| &raw const from);
        let mut attr = Attr::new()
            .pointer(0, from)
            .pointer(8, &raw mut next)
            .pointer(16, keys.as_mut_ptr())
            .pointer(24, values.as_mut_ptr())
            .u32(32, count)
            .fd(36, self.fd.as_fd());
        // SAFETY: the buffers have room for `count` keys and `count` values of the map's sizes, and the positions are words.
        let result = unsafe { attr.call(BPF_MAP_LOOKUP_BATCH) };
        let has_more = self.is_found(result)?;
        // The kernel stores the number of values that it has read.
        let read = usize::try_from(attr.read_u32(32)).unwrap_or(length);
        values.truncate(read);
        Ok((values, has_more.then_some(next)))
    }

    /// Reads the first `count` values in an array with one system call.
    pub(in crate::bpf) fn read_first(&self, count: u32) -> Result<Vec<V>, ReadError> {
        let length =
            usize::try_from(count).map_err(|error| self.read_error(io::Error::other(error)))?;
        let (mut keys, mut values) = (vec![K::new_zeroed(); length], vec![V::new_zeroed(); length]);
        let mut next = K::new_zeroed();
        let mut attr = Attr::new()
            .pointer(8, &raw mut next)
            .pointer(16, keys.as_mut_ptr())
            .pointer(24, values.as_mut_ptr())
            .u32(32, count)
            .fd(36, self.fd.as_fd());
        // SAFETY: the buffers have room for `count` keys and `count` values of the map's sizes.
        let result = unsafe { attr.call(BPF_MAP_LOOKUP_BATCH) };
        // Reaching the end of the array is not an error.
        self.is_found(result).map(|_| values)
    }

    /// Writes the value for a key.
    pub(in crate::bpf) fn write(&self, key: &K, value: &V) -> Result<(), WriteError> {
        let mut attr = self.key_attr(key).pointer(16, ptr::from_ref(value));
        // SAFETY: key and value have the map's key and value sizes, and outlive the call.
        let written = unsafe { attr.call(BPF_MAP_UPDATE_ELEM) };
        written.map(drop).map_err(|error| self.write_error(error))
    }

    /// Writes entries in order, with one system call. Returns how many were written, and an error if not all
    /// of them were.
    pub(in crate::bpf) fn write_batch(
        &self,
        entries: &[(K, V)],
    ) -> (usize, Result<(), WriteError>) {
        let (keys, values): (Vec<K>, Vec<V>) = entries.iter().copied().unzip();
        let Ok(count) = u32::try_from(entries.len()) else {
            return (
                0,
                Err(self.write_error(io::Error::other("too many entries for one call"))),
            );
        };
        if count == 0 {
            return (0, Ok(()));
        }
        let mut attr = Attr::new()
            .pointer(16, keys.as_ptr())
            .pointer(24, values.as_ptr())
            .u32(32, count)
            .fd(36, self.fd.as_fd());
        // SAFETY: the vectors have `count` keys and `count` values of the map's sizes; the kernel only reads
        // them.
        match unsafe { attr.call(BPF_MAP_UPDATE_BATCH) } {
            Ok(_) => (entries.len(), Ok(())),
            // In the attribute, the kernel stores how many entries it wrote, unless it wrote none.
            Err(error) => {
                let written = usize::try_from(attr.read_u32(32)).ok();
                let written = written.filter(|written| *written < entries.len());
                (written.unwrap_or(0), Err(self.write_error(error)))
            }
        }
    }

    /// Removes a key if it exists.
    pub(in crate::bpf) fn remove(&self, key: &K) -> Result<(), WriteError> {
        // SAFETY: the key has the map's key size, and outlives the call.
        match unsafe { self.key_attr(key).call(BPF_MAP_DELETE_ELEM) } {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.write_error(error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Returns true if a read found its key, and false if the key does not exist; converts any other error.
    fn is_found(&self, result: io::Result<i64>) -> Result<bool, ReadError> {
        match result {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.read_error(error)),
        }
    }

    fn key_attr(&self, key: &K) -> Attr {
        let attr = Attr::new().fd(0, self.fd.as_fd());
        attr.pointer(8, ptr::from_ref(key))
    }

    const fn read_error(&self, source: io::Error) -> ReadError {
        let map = self.row.name;
        ReadError { map, source }
    }

    const fn write_error(&self, source: io::Error) -> WriteError {
        let map = self.row.name;
        WriteError { map, source }
    }
}
