//! Culvert's kernel programs. `logging.rs` builds the same programs with event logs.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod bytes;
mod client;
mod context;
mod guard;
mod hooks;
#[path = "silent.rs"]
mod log;
mod maps;
mod origin;
mod refusal;
mod socket;
mod steering;

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
