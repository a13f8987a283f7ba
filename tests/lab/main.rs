//! Tests the lab itself: its sandboxes, its loads, and its complete removal. The tests need root and a cgroup
//! v2 hierarchy.

#[cfg(test)]
mod edge;
#[cfg(test)]
mod removal;
#[cfg(test)]
mod sandboxes;
#[cfg(test)]
mod traffic;
