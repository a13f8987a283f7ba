//! The maps of the sockets' older translations, and all access to them.

use aya_ebpf::{
    btf_maps::{HashMap, LruHashMap, SkStorage},
    macros::btf_map,
    programs::{SockAddrContext, SockContext},
};
use tunnel_common::{
    older::{OlderFew, OlderMany, OlderShared},
    origin::{Origin, Overflow, OverflowKey},
};

use super::NO_PREALLOC;

#[btf_map(name = "older_few")]
static OLDER_FEW: SkStorage<OlderFew> = SkStorage::new();
#[btf_map(name = "older_many")]
static OLDER_MANY: SkStorage<OlderMany> = SkStorage::new();
#[btf_map(name = "older_shared")]
static OLDER_SHARED: HashMap<OverflowKey, OlderShared, 1, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "overflow")]
static OVERFLOW: LruHashMap<OverflowKey, Overflow, 1, NO_COMMON_LRU> = LruHashMap::new();

const NO_COMMON_LRU: usize = aya_ebpf::bindings::BPF_F_NO_COMMON_LRU as usize;

/// Returns a socket's value in `older_few`. The caller must not hold another reference to it.
#[inline(always)]
pub(crate) fn few(ctx: &SockAddrContext) -> Option<&'static mut OlderFew> {
    // SAFETY: the helper takes the socket in the context.
    let value = unsafe { OLDER_FEW.get_ptr_mut(ctx) };
    // SAFETY: the pointer is null, or the value stays mapped until the program ends. Only programs that hold
    // the socket's lock change it.
    unsafe { value.as_mut() }
}

/// Returns a socket's value in `older_few`, and creates it if necessary. Returns `None` if there is no memory.
#[inline(always)]
pub(crate) fn few_or_new(ctx: &SockAddrContext) -> Option<&'static mut OlderFew> {
    // SAFETY: as for `few`. A new value is zero.
    let value = unsafe { OLDER_FEW.get_or_insert_ptr_mut(ctx, None) };
    // SAFETY: as for `few`.
    unsafe { value.as_mut() }
}

/// Returns a socket's value in `older_many`. The caller must not hold another reference to it.
#[inline(always)]
pub(crate) fn many(ctx: &SockAddrContext) -> Option<&'static mut OlderMany> {
    // SAFETY: as for `few`.
    let value = unsafe { OLDER_MANY.get_ptr_mut(ctx) };
    // SAFETY: as for `few`.
    unsafe { value.as_mut() }
}

/// Returns a socket's value in `older_many`, and creates it if necessary. Returns `None` if there is no
/// memory.
#[inline(always)]
pub(crate) fn many_or_new(ctx: &SockAddrContext) -> Option<&'static mut OlderMany> {
    // SAFETY: as for `few_or_new`.
    let value = unsafe { OLDER_MANY.get_or_insert_ptr_mut(ctx, None) };
    // SAFETY: as for `few`.
    unsafe { value.as_mut() }
}

/// Returns the value in `older_many` of a socket that is being closed.
#[inline(always)]
pub(crate) fn many_of_closed(ctx: &SockContext) -> Option<&'static mut OlderMany> {
    let value = super::value_of_closed(&OLDER_MANY, ctx);
    // SAFETY: as for `few`.
    unsafe { value.as_mut() }
}

/// Returns an entry of a socket in `older_shared`. Only programs that hold the lock of this socket add, change
/// or remove its entries. A lookup for one key may however return the element of another key, if the kernel
/// reuses the element at this moment, so the key in the entry is checked.
#[inline(always)]
pub(crate) fn shared(key: &OverflowKey) -> Option<&'static mut OlderShared> {
    let value = OLDER_SHARED.get_ptr_mut(key)?;
    // SAFETY: the element stays mapped until the program ends. Every bit pattern is valid.
    let entry = unsafe { value.as_mut() }?;
    (entry.key == *key).then_some(entry)
}

/// Stores an entry in `older_shared`. Returns false if the map is full.
#[inline(always)]
pub(crate) fn insert_shared(entry: &OlderShared) -> bool {
    #[expect(
        clippy::needless_borrows_for_generic_args,
        reason = "a copy takes stack space"
    )]
    OLDER_SHARED.insert(&entry.key, entry, 0).is_ok()
}

/// Removes an entry from `older_shared`.
#[inline(always)]
pub(crate) fn remove_shared(key: &OverflowKey) {
    let _absent: Result<(), i32> = OLDER_SHARED.remove(key);
}

/// Returns a translation that a program of layout 7 or earlier stored, if there is an entry that contains the
/// given key.
#[inline(always)]
pub(crate) fn overflow(key: &OverflowKey) -> Option<&'static Origin> {
    // SAFETY: the element stays mapped until the program ends. While a program of layout 7 is still attached,
    // the kernel may reuse the element for another key; the caller checks the address in the translation.
    let entry = unsafe { OVERFLOW.get(key) }?;
    (entry.key == *key).then_some(&entry.origin)
}

/// Removes a translation that a program of layout 7 or earlier stored.
#[inline(always)]
pub(crate) fn remove_overflow(key: &OverflowKey) {
    let _absent: Result<(), i32> = OVERFLOW.remove(key);
}
