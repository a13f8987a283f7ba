//! The laboratory itself: that places are what they claim, and that nothing of them stays.
//! Needs the rights of root and a cgroup v2 hierarchy.

#[cfg(test)]
mod edge;
#[cfg(test)]
mod ends;
#[cfg(test)]
mod places;
#[cfg(test)]
mod traffic;
