//! Tests of the laboratory itself: sandboxes, loads, and the complete removal of everything. They need
//! root and a cgroup v2 hierarchy.

#[cfg(test)]
mod edge;
#[cfg(test)]
mod removal;
#[cfg(test)]
mod sandboxes;
#[cfg(test)]
mod traffic;
