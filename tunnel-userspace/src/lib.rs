//! Culvert's daemon and command line.
//!
//! - [`k8s`]: Kubernetes objects become domain types, or are refused by field
//! - [`model`]: plain domain types
//! - [`source`]: where objects come from
pub mod k8s;
pub mod model;
pub mod source;
