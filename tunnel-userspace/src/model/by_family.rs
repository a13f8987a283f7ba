use super::Family;

/// A value of each family.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ByFamily<T> {
    /// The value of IPv4.
    pub v4: T,
    /// The value of IPv6.
    pub v6: T,
}

impl<T> ByFamily<T> {
    /// Returns the value of a family.
    pub const fn of(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Returns the value of a family, to be changed.
    pub const fn of_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}
