use super::Family;

/// One value for IPv4 and one for IPv6.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ByFamily<T> {
    /// The value for IPv4.
    pub v4: T,
    /// The value for IPv6.
    pub v6: T,
}

impl<T> ByFamily<T> {
    /// Returns the value for a family.
    pub const fn of(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// Returns a mutable reference to the value for a family.
    pub const fn of_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}
