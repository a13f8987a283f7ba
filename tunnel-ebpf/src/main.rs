//! Culvert's kernel programs. `main_with_event_log.rs` builds the same programs with event logs.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod client_address;
mod context;
#[path = "event_log_disabled.rs"]
mod event_log;
mod forward;
mod guard;
mod hooks;
mod maps;
mod older;
mod origin;
mod packet;
mod refusal;
mod socket;
mod steering;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
