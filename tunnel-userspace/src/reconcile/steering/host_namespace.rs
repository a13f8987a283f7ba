//! The cookie of the host's network namespace, which a probe of the programs shows.

use tunnel_common::steering::{SteeringKey, SteeringRecord};

use super::SteeringReconciler;
use crate::reconcile::map_access::{AdoptError, SteeringMaps, WriteError};

impl<M: SteeringMaps> SteeringReconciler<M> {
    /// Writes the key for the address and port that the daemon's probe connects to from the socket with the
    /// given cookie. When this socket connects, the BPF program stores the cookie of its network namespace.
    ///
    /// # Errors
    ///
    /// Returns an error if the maps can't be written.
    pub fn write_probe_key(&mut self, key: &SteeringKey, cookie: u64) -> Result<(), WriteError> {
        let index = self.probe_index();
        self.maps
            .write_record(index, &SteeringRecord::probe(*key, cookie))?;
        self.maps.write_key(key, index)
    }

    /// Removes the probe's key. Returns the cookie of the host's network namespace, or 0 if no program has
    /// stored one. [`Self::repair_host_namespace`] keeps this cookie from now on.
    ///
    /// # Errors
    ///
    /// Returns an error if the maps can't be written or read.
    pub fn remove_probe_key(&mut self, key: &SteeringKey) -> Result<u64, AdoptError> {
        self.maps.delete_key(key)?;
        let cookie = self.maps.host_namespace()?;
        self.host_namespace = Some(cookie).filter(|cookie| *cookie != 0);
        Ok(cookie)
    }

    /// Writes the cookie of the host's network namespace again if the map has another one. Returns true if it
    /// had.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read or written.
    pub fn repair_host_namespace(&mut self) -> Result<bool, AdoptError> {
        let Some(cookie) = self.host_namespace else {
            return Ok(false);
        };
        let differs = self.maps.host_namespace()? != cookie;
        if differs {
            self.maps.write_host_namespace(cookie)?;
        }
        Ok(differs)
    }
}
