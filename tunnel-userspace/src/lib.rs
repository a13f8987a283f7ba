//! Culvert's daemon and command line.
//!
//! - [`model`]: plain domain types
pub mod model;
