//! Tests of the laboratory itself: the properties of places, and their complete removal. Needs root and
//! a cgroup v2 hierarchy.

#[cfg(test)]
mod edge;
#[cfg(test)]
mod ends;
#[cfg(test)]
mod places;
#[cfg(test)]
mod traffic;
