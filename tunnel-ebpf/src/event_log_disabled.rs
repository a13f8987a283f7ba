//! The event log in the default build, where its functions do nothing.

use tunnel_common::{
    addr::Address, forward::Step, origin::Origin, reason::Reason, service::FrontendKey,
};

#[inline(always)]
pub(crate) const fn translated(_: &Origin, _: Reason) {}

#[inline(always)]
pub(crate) const fn refused(_: &FrontendKey, _: Reason) {}

#[inline(always)]
pub(crate) const fn not_translated(_: &FrontendKey) {}

#[inline(always)]
pub(crate) const fn peer_kept(_: &FrontendKey) {}

#[inline(always)]
pub(crate) const fn vip_restored(_: &Origin) {}

#[inline(always)]
pub(crate) const fn socket_closed(_: &Origin) {}

#[inline(always)]
pub(crate) const fn dropped(_: Address) {}

#[inline(always)]
pub(crate) const fn packet(_: Step) {}
