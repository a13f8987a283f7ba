//! Virtual machines with the kernels that Culvert supports.

mod archive;
mod cache;
mod control;
mod cpio;
mod fetch;
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "what runs guests uses the rest")
)]
mod initramfs;
mod kernels;
mod modules;
mod qemu;
mod sources;

use anyhow::Result;

/// Fetches the emulator and all kernels, and says what they are.
pub(crate) fn fetch(offline: bool) -> Result<()> {
    let qemu = qemu::ready(offline)?;
    println!("{}", qemu.version());
    for line in &kernels::LINES {
        let kernel = fetch::ready(line, offline)?;
        println!(
            "  {} {} {}{}\n  {}\n  {}\n  {}\n  without: {}",
            kernel.line,
            kernel.release,
            kernel.version,
            if kernel.pinned { ", pinned" } else { "" },
            kernel.image.display(),
            kernel.base.display(),
            kernel.config.unwrap_or_default().display(),
            kernel.absent.join(" ")
        );
    }
    Ok(())
}
