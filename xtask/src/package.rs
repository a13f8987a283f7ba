//! The container image, made without Docker.

mod layer;
pub(crate) mod oci;
