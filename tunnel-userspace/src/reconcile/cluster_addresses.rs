//! Writes which addresses are cluster IPs, and from which ranges they are allocated, so that the programs refuse packets to
//! other ports of cluster IPs, and drop packets to addresses that are not allocated (kube-proxy
//! `pkg/proxy/nftables/proxier.go`, `cluster-ips-check`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    ops::Bound,
    sync::Arc,
};

use foldhash::HashMap;
use tunnel_common::{
    addr::Address,
    service::SourceRange,
    service_range::{CLUSTER_IP, LEFT_ALONE, MAX_SERVICE_RANGES, RangeKind, ServiceRange},
    steering::Prefix,
};

use super::map_access::{AdoptError, ReadError, WriteError};
use crate::model::{ClusterUpdate, ObjectName, Service, ServiceCidr};

/// Reads and writes the values of `services` for addresses, and the array `service_ranges`.
pub trait AddressMaps: Send {
    /// Returns all addresses that have a value.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the read.
    fn addresses(&self) -> Result<Vec<(Address, u32)>, ReadError>;
    /// Writes values of addresses.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses a write. This also applies to the other methods that write.
    fn write_addresses(&mut self, values: &[(Address, u32)]) -> Result<(), WriteError>;
    /// Removes an address if it has a value.
    fn remove_address(&mut self, address: &Address) -> Result<(), WriteError>;
    /// Writes an entry of `service_ranges`.
    fn write_range(&mut self, index: u32, range: &ServiceRange) -> Result<(), WriteError>;
}

/// Owns the values of addresses in the maps.
pub struct ClusterAddresses {
    maps: Box<dyn AddressMaps>,
    /// The maximum number of addresses in the maps.
    capacity: u32,
    /// The Services that have cluster IPs.
    services: HashMap<ObjectName, Arc<Service>>,
    cidrs: BTreeMap<ObjectName, Arc<ServiceCidr>>,
    /// The addresses of this node's links.
    own: Arc<BTreeSet<IpAddr>>,
    entries: BTreeMap<Address, Entry>,
    /// The number of addresses in the maps.
    used: u32,
    /// The addresses whose values may have to be written.
    changed: BTreeSet<Address>,
    /// The ranges in the maps; `None` if unknown.
    ranges: Option<Vec<ServiceRange>>,
    /// True if a write has failed, so that the contents of the maps are unknown.
    must_read_again: bool,
    /// True if the sources have delivered all objects, and all of them could be read. Otherwise, an address that no Service has
    /// may still belong to one, so nothing is dropped.
    is_complete: bool,
    /// True if there was no room for an address whose packets must be left alone. In that case, nothing is dropped.
    lacks_room: bool,
}

/// The Services of an address, and its value in the maps.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The number of Services that have it as a cluster IP and are served.
    served: u32,
    /// The number of other Services that have it as a cluster IP.
    unserved: u32,
    /// The value in the maps, if it has one.
    written: Option<u32>,
}

impl ClusterAddresses {
    /// Takes over the maps with their current contents. At most `capacity` addresses get a value.
    ///
    /// # Errors
    ///
    /// Returns an error if the maps can't be read.
    pub fn adopt(maps: Box<dyn AddressMaps>, capacity: u32) -> Result<Self, ReadError> {
        let mut addresses = Self {
            maps,
            capacity,
            services: HashMap::default(),
            cidrs: BTreeMap::new(),
            own: Arc::default(),
            entries: BTreeMap::new(),
            used: 0,
            changed: BTreeSet::new(),
            ranges: None,
            must_read_again: false,
            is_complete: false,
            lacks_room: false,
        };
        addresses.read_again()?;
        Ok(addresses)
    }

    /// Reads the maps again, and returns true if they differ from what was last written. The next sync then repairs them.
    pub fn audit(&mut self) -> bool {
        let stored = match self.maps.addresses() {
            Ok(stored) => stored,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(error, "cannot audit the cluster IPs");
                return false;
            }
        };
        let written = |address: &Address| self.entries.get(address)?.written;
        let differs = |(address, value): &(Address, u32)| written(address) != Some(*value);
        let has_differences =
            u32::try_from(stored.len()) != Ok(self.used) || stored.iter().any(differs);
        if has_differences {
            self.set_stored(stored);
        }
        has_differences
    }

    /// Returns true if a write has failed, and must be tried again.
    #[must_use]
    pub const fn is_incomplete(&self) -> bool {
        self.must_read_again
    }

    fn read_again(&mut self) -> Result<(), ReadError> {
        let stored = self.maps.addresses()?;
        self.set_stored(stored);
        Ok(())
    }

    /// Takes over the present contents of the maps.
    fn set_stored(&mut self, stored: Vec<(Address, u32)>) {
        self.used = u32::try_from(stored.len()).unwrap_or(u32::MAX);
        self.ranges = None;
        for entry in self.entries.values_mut() {
            entry.written = None;
        }
        for (address, value) in stored {
            self.entries.entry(address).or_default().written = Some(value);
        }
        self.changed = self.entries.keys().copied().collect();
        self.add_own_addresses();
        self.must_read_again = false;
    }

    /// Applies the changes in an update. Doesn't write to the maps.
    pub fn update(&mut self, update: &ClusterUpdate) {
        self.is_complete = update.complete;
        for (name, state) in &update.services {
            let service = state.as_ref().map(|state| &state.service);
            self.set_service(name, service);
        }
        for (name, cidr) in &update.service_cidrs {
            match cidr {
                Some(cidr) => self.cidrs.insert(name.clone(), Arc::clone(cidr)),
                None => self.cidrs.remove(name),
            };
        }
        if !update.service_cidrs.is_empty() {
            self.add_own_addresses();
        }
    }

    /// Replaces the set of this node's addresses. Doesn't write to the maps.
    pub fn set_own_addresses(&mut self, addresses: Arc<BTreeSet<IpAddr>>) {
        self.add_own_addresses();
        self.own = addresses;
        self.add_own_addresses();
    }

    fn add_own_addresses(&mut self) {
        let own = self.own.iter().copied().map(Address::from_ip);
        self.changed.extend(own);
    }

    fn set_service(&mut self, name: &ObjectName, service: Option<&Arc<Service>>) {
        let with_ips = service.filter(|service| !service.cluster_ips.is_empty());
        let before = match with_ips {
            Some(service) => self.services.insert(name.clone(), Arc::clone(service)),
            None => self.services.remove(name),
        };
        if let Some(before) = before {
            self.count(&before, |number| number.saturating_sub(1));
        }
        if let Some(service) = with_ips {
            self.count(service, |number| number + 1);
        }
    }

    /// Changes the number of Services of each cluster IP of a Service.
    fn count(&mut self, service: &Service, change: impl Fn(u32) -> u32) {
        for ip in &service.cluster_ips {
            let address = Address::from_ip(*ip);
            let entry = self.entries.entry(address).or_default();
            let number = if service.is_served() {
                &mut entry.served
            } else {
                &mut entry.unserved
            };
            *number = change(*number);
            self.changed.insert(address);
        }
    }

    /// Writes the addresses whose packets are left alone, before the frontends of Services are written. If a write fails, the
    /// next sync tries again.
    pub fn sync_left_alone(&mut self) {
        if self.must_read_again || self.changed.is_empty() {
            return;
        }
        let mut wanted = self.wanted_values(&self.wanted_ranges());
        wanted.retain(|(_, value)| *value == Some(LEFT_ALONE));
        if wanted.is_empty() {
            return;
        }
        let written = self.write_values(&wanted);
        self.report(written.map_err(AdoptError::Write));
    }

    /// Writes the changes. If a write fails, the next sync tries again.
    pub fn sync(&mut self) {
        let is_same = self.ranges.as_ref() == Some(&self.wanted_ranges());
        if self.changed.is_empty() && is_same && !self.must_read_again {
            return;
        }
        let written = self.write_changes();
        self.report(written);
    }

    fn report(&mut self, written: Result<(), AdoptError>) {
        if let Err(error) = written {
            self.must_read_again = true;
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                error,
                "cannot write the cluster IPs, so packets to other ports of some of them are not refused"
            );
        }
    }

    fn write_changes(&mut self) -> Result<(), AdoptError> {
        if self.must_read_again {
            self.read_again()?;
        }
        let wanted = self.wanted_values(&self.wanted_ranges());
        self.write_values(&wanted)?;
        // Those that need an address to be left alone, but have no room for it, drop nothing.
        let ranges = self.wanted_ranges();
        if self.ranges.as_ref() != Some(&ranges) {
            let all = ranges
                .iter()
                .chain(std::iter::repeat(&ServiceRange::UNUSED));
            for (index, range) in (0..MAX_SERVICE_RANGES).zip(all) {
                self.maps.write_range(index, range)?;
            }
            self.ranges = Some(ranges);
        }
        // Last, because an address of this node must have its value as long as a range contains it.
        for (address, value) in &wanted {
            if value.is_none() {
                self.remove(address)?;
            } else if self.entries.get(address).and_then(|it| it.written) == *value {
                self.changed.remove(address);
            }
        }
        Ok(())
    }

    /// Returns the addresses that have changed, with the values that they should have: first those that must be left alone.
    fn wanted_values(&self, ranges: &[ServiceRange]) -> Vec<(Address, Option<u32>)> {
        let changed = self.changed.iter();
        let mut wanted: Vec<_> = changed
            .map(|address| (*address, self.wanted_value(address, ranges)))
            .collect();
        let is_own = |address: &Address| self.own.contains(&address.to_ip());
        wanted.sort_by_key(|(address, value)| (*value != Some(LEFT_ALONE), !is_own(address)));
        wanted
    }

    /// Writes the values that are different in the maps, as far as there is room.
    fn write_values(&mut self, wanted: &[(Address, Option<u32>)]) -> Result<(), WriteError> {
        let mut room = self.capacity.saturating_sub(self.used);
        let mut lacks_room = false;
        let mut values = Vec::new();
        for (address, value) in wanted {
            let Some(value) = *value else { continue };
            match self.entries.get(address).and_then(|entry| entry.written) {
                Some(written) if written == value => continue,
                Some(_) => {}
                None if room == 0 => {
                    lacks_room |= value == LEFT_ALONE;
                    continue;
                }
                None => room -= 1,
            }
            values.push((*address, value));
        }
        if lacks_room && !self.lacks_room {
            tracing::warn!(
                "packets to unallocated addresses of ServiceCIDRs are not dropped: bpf.maps.frontends has no room for all \
                 addresses that must be left alone"
            );
        }
        self.lacks_room = lacks_room;
        self.maps.write_addresses(&values)?;
        for (address, value) in values {
            let entry = self.entries.entry(address).or_default();
            self.used += u32::from(entry.written.is_none());
            entry.written = Some(value);
        }
        Ok(())
    }

    /// Removes the value of an address, and forgets the address if no Service has it.
    fn remove(&mut self, address: &Address) -> Result<(), WriteError> {
        let Some(entry) = self.entries.get_mut(address) else {
            self.changed.remove(address);
            return Ok(());
        };
        if entry.written.is_some() && !self.is_complete {
            // It may belong to a Service that is not known yet.
            return Ok(());
        }
        self.changed.remove(address);
        if entry.written.is_some() {
            self.maps.remove_address(address)?;
            entry.written = None;
            self.used -= 1;
        }
        if entry.served == 0 && entry.unserved == 0 {
            self.entries.remove(address);
        }
        Ok(())
    }

    /// Returns the value that an address should have.
    fn wanted_value(&self, address: &Address, ranges: &[ServiceRange]) -> Option<u32> {
        let entry = self.entries.get(address).copied().unwrap_or_default();
        if self.own.contains(&address.to_ip()) {
            let is_in_range = ranges.iter().any(|range| range.contains(address));
            return is_in_range.then_some(LEFT_ALONE);
        }
        if entry.unserved > 0 {
            return Some(LEFT_ALONE);
        }
        (entry.served > 0).then_some(CLUSTER_IP)
    }

    /// Returns the ServiceCIDRs, and for each address family the range of all cluster IPs unless a ServiceCIDR contains it.
    fn wanted_ranges(&self) -> Vec<ServiceRange> {
        let kind = if self.is_complete && !self.lacks_room {
            RangeKind::SERVICE_CIDR
        } else {
            RangeKind::CONTAINS_CLUSTER_IPS
        };
        let cidrs = self.cidrs.values().flat_map(|cidr| &cidr.cidrs);
        let cidrs = cidrs.filter_map(|(ip, length)| {
            let prefix = Prefix::new(Address::from_ip(*ip), *length)?;
            let is_plausible = *length
                >= if ip.is_ipv4() {
                    MIN_LENGTH_V4
                } else {
                    MIN_LENGTH_V6
                };
            is_plausible.then(|| ServiceRange {
                addresses: SourceRange::of_prefix(&prefix),
                kind,
            })
        });
        let mut ranges: Vec<_> = cidrs.collect();
        ranges.sort_by_key(|range| range.addresses);
        ranges.dedup();
        ranges.truncate(MAX_CIDRS);
        let [first_v4, last_v4] =
            [Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST].map(|ip| Address::from_ip(IpAddr::V4(ip)));
        let families = [
            (Bound::Included(first_v4), Bound::Included(last_v4)),
            (Bound::Excluded(last_v4), Bound::Unbounded),
        ];
        for family in families {
            let used = self.entries.range(family);
            let mut used = used.filter(|(_, entry)| entry.served + entry.unserved > 0);
            let Some((&first, _)) = used.next() else {
                continue;
            };
            let last = used.next_back().map_or(first, |(last, _)| *last);
            let is_known = |range: &ServiceRange| range.contains(&first) && range.contains(&last);
            if !ranges.iter().any(is_known) {
                let range = ServiceRange {
                    addresses: SourceRange { first, last },
                    kind: RangeKind::CONTAINS_CLUSTER_IPS,
                };
                ranges.insert(0, range);
            }
        }
        ranges
    }
}

/// The maximum number of ranges of ServiceCIDRs. Two more entries are for the ranges of cluster IPs.
#[expect(clippy::as_conversions, reason = "`From` is not const")]
const MAX_CIDRS: usize = MAX_SERVICE_RANGES as usize - 2;
/// The minimum prefix length of a ServiceCIDR whose addresses are dropped. Larger ranges are mistakes, which would cut off other
/// hosts.
const MIN_LENGTH_V4: u8 = 8;
const MIN_LENGTH_V6: u8 = 32;

#[cfg(test)]
mod tests;
