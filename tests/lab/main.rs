//! Tests of the laboratory itself: sandboxes, loads, and the complete removal of everything. They need
//! root and a cgroup v2 hierarchy.

#[cfg(test)]
mod edge;
#[cfg(test)]
mod ends;
#[cfg(test)]
mod places;
#[cfg(test)]
mod traffic;
