//! Culvert's daemon and command line.
//!
//! - [`k8s`]: Kubernetes objects become domain types, or are refused by field
//! - [`model`]: plain domain types
pub mod k8s;
pub mod model;
