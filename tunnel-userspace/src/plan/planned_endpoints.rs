//! The endpoints in a plan. Ports of a Service that have the same endpoints share one list of them, even if
//! their port numbers differ.

use std::{fmt, sync::Arc};

use tunnel_common::{
    addr::{Address, Port},
    service::Membership,
};

use super::BackendTarget;

/// An endpoint in a shared list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ListedEndpoint {
    pub(super) address: Address,
    /// The position of the endpoint's port number among the port's numbers.
    pub(super) number: u16,
    pub(super) weight: u8,
    pub(super) sets: Membership,
}

/// The endpoints of one or more ports, in ascending order of address and port number.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct EndpointList {
    pub(super) endpoints: Box<[ListedEndpoint]>,
    /// All sets that contain an endpoint.
    pub(super) sets: Membership,
}

impl FromIterator<ListedEndpoint> for EndpointList {
    fn from_iter<I: IntoIterator<Item = ListedEndpoint>>(endpoints: I) -> Self {
        let endpoints: Box<[ListedEndpoint]> = endpoints.into_iter().collect();
        let sets = endpoints.iter().map(|endpoint| endpoint.sets);
        Self {
            sets: sets.fold(Membership::NONE, Membership::union),
            endpoints,
        }
    }
}

/// The port numbers of a port's endpoints. Nearly all ports have only one.
#[derive(Clone, Eq, PartialEq)]
pub(super) enum PortNumbers {
    One(Port),
    Many(Arc<[Port]>),
}

impl From<&[Port]> for PortNumbers {
    fn from(numbers: &[Port]) -> Self {
        match numbers {
            [number] => Self::One(*number),
            numbers => Self::Many(numbers.into()),
        }
    }
}

impl PortNumbers {
    fn get(&self, position: u16) -> Option<Port> {
        match self {
            Self::One(number) => (position == 0).then_some(*number),
            Self::Many(numbers) => numbers.get(usize::from(position)).copied(),
        }
    }
}

/// An endpoint that serves new or open connections.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PlannedEndpoint {
    /// The address and port.
    pub target: BackendTarget,
    /// The weight; greater than 0.
    pub weight: u32,
    /// The backend sets that contain the endpoint. An endpoint in no set serves only its open connections.
    pub sets: Membership,
}

/// The endpoints of a service port that serve new or open connections, in ascending order of address and
/// port. The sets apply if a frontend has the corresponding traffic policy.
#[derive(Clone, Eq, PartialEq)]
pub struct PlannedEndpoints {
    numbers: PortNumbers,
    list: Arc<EndpointList>,
}

impl PlannedEndpoints {
    pub(super) const fn new(numbers: PortNumbers, list: Arc<EndpointList>) -> Self {
        Self { numbers, list }
    }

    /// Returns the endpoints in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = PlannedEndpoint> {
        let endpoints = self.list.endpoints.iter();
        endpoints.filter_map(|endpoint| {
            Some(PlannedEndpoint {
                target: BackendTarget {
                    address: endpoint.address,
                    port: self.numbers.get(endpoint.number)?,
                },
                weight: u32::from(endpoint.weight),
                sets: endpoint.sets,
            })
        })
    }

    /// Returns how many endpoints there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.list.endpoints.len()
    }

    /// Returns true if there are no endpoints.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.endpoints.is_empty()
    }

    /// Returns true if at least one endpoint is in the given set.
    #[must_use]
    pub fn has_any_in(&self, set: Membership) -> bool {
        self.list.sets.includes(set)
    }

    /// Returns true if both ports refer to the same list in memory.
    #[cfg(test)]
    pub(super) fn shares_list_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.list, &other.list)
    }
}

impl Default for PlannedEndpoints {
    fn default() -> Self {
        Self::new(PortNumbers::One(Port::from_network(0)), Arc::default())
    }
}

impl fmt::Debug for PlannedEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl FromIterator<PlannedEndpoint> for PlannedEndpoints {
    /// Collects endpoints that are in ascending order.
    fn from_iter<I: IntoIterator<Item = PlannedEndpoint>>(endpoints: I) -> Self {
        let mut numbers: Vec<Port> = Vec::new();
        let mut listed = Vec::new();
        for endpoint in endpoints {
            let port = endpoint.target.port;
            let known = numbers.iter().position(|number| *number == port);
            let position = known.unwrap_or_else(|| {
                numbers.push(port);
                numbers.len() - 1
            });
            listed.push(ListedEndpoint {
                address: endpoint.target.address,
                number: u16::try_from(position).unwrap_or(u16::MAX),
                weight: u8::try_from(endpoint.weight).unwrap_or(u8::MAX),
                sets: endpoint.sets,
            });
        }
        Self::new(
            numbers.as_slice().into(),
            Arc::new(listed.into_iter().collect()),
        )
    }
}
