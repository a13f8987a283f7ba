use serde::{Deserialize, Serialize};

/// An IP family.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Returns the name of the family, as used in the `addressType` of an EndpointSlice.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    /// Returns the family of an address. An IPv4-mapped IPv6 address counts as IPv4.
    #[must_use]
    pub const fn of(address: std::net::IpAddr) -> Self {
        match address.to_canonical() {
            std::net::IpAddr::V4(_) => Self::V4,
            std::net::IpAddr::V6(_) => Self::V6,
        }
    }
}

/// A pair of values, one for IPv4 and one for IPv6.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PerFamily<T> {
    /// The value for IPv4.
    pub v4: T,
    /// The value for IPv6.
    pub v6: T,
}

impl<T> PerFamily<T> {
    /// Returns the value for a family.
    pub const fn get(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Returns a mutable reference to the value for a family.
    pub const fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}
