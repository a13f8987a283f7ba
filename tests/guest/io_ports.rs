//! Two x86 I/O ports of the virtual machine. QEMU logs each byte that is written to one of them, and exits
//! when a byte is written to the other.
#![expect(unsafe_code, reason = "I/O ports need the instruction `out`")]

use std::{arch::asm, io, process::ExitCode};

/// The port of QEMU's device `isa-debugcon`.
const REPORT_PORT: u16 = 0xe9;
/// The port of QEMU's device `isa-debug-exit`. QEMU's exit status is twice the value written, plus one.
const EXIT_PORT: u16 = 0xf4;
const PASSED: u8 = 0x10;
const FAILED: u8 = 0x11;

/// Access to the I/O ports. A value of this type exists only if the kernel has granted this process access to
/// the ports.
pub(crate) struct IoPorts(());

impl IoPorts {
    pub(crate) fn open() -> io::Result<Self> {
        // SAFETY: the call changes only this process's I/O privilege level, and accesses no memory.
        let result = unsafe { nix::libc::iopl(3) };
        if result == 0 {
            Ok(Self(()))
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Reports an event as a line of JSON.
    pub(crate) fn event(&self, event: &serde_json::Value) {
        self.write(&format!("{event}\n"));
    }

    /// Reports a line of output from a program.
    pub(crate) fn line(&self, line: &str) {
        self.write(&format!("| {line}\n"));
    }

    fn write(&self, text: &str) {
        for byte in text.bytes() {
            write_byte(REPORT_PORT, byte);
        }
    }

    /// Stops the virtual machine. QEMU's exit status depends on `passed`.
    pub(crate) fn exit(self, passed: bool) -> ExitCode {
        write_byte(EXIT_PORT, if passed { PASSED } else { FAILED });
        // If QEMU lacks the device `isa-debug-exit`, the virtual machine stops when this process, its init
        // process, exits.
        ExitCode::FAILURE
    }
}

fn write_byte(port: u16, byte: u8) {
    // SAFETY: `IoPorts::open` has raised the I/O privilege level. The devices at both ports take one byte,
    // and access none of the virtual machine's memory.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags));
    }
}
