//! The event log of the default build: its functions do nothing.

use tunnel_common::{addr::Address, origin::Origin, reason::Reason, service::FrontKey};

#[inline(always)]
pub(crate) const fn translated(_: &Origin, _: Reason) {}

#[inline(always)]
pub(crate) const fn refused(_: &FrontKey, _: Reason) {}

#[inline(always)]
pub(crate) const fn left_alone(_: &FrontKey) {}

#[inline(always)]
pub(crate) const fn goes_on(_: &FrontKey) {}

#[inline(always)]
pub(crate) const fn put_back(_: &Origin) {}

#[inline(always)]
pub(crate) const fn released(_: &Origin) {}

#[inline(always)]
pub(crate) const fn guarded(_: Address) {}
