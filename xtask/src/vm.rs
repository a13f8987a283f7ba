//! Virtual machines with the kernels that Culvert supports.

#[expect(dead_code, reason = "what fetches kernels uses the rest")]
mod archive;
mod cache;
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "what fetches kernels uses the rest")
)]
mod control;
mod cpio;
#[expect(dead_code, reason = "what fetches kernels uses the rest")]
mod initramfs;
mod modules;
mod qemu;
mod sources;

use anyhow::Result;

/// Fetches the emulator and says what it is.
pub(crate) fn fetch(offline: bool) -> Result<()> {
    let qemu = qemu::ready(offline)?;
    println!("{}", qemu.version());
    Ok(())
}
