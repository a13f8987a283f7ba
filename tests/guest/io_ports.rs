//! Two x86 I/O ports in the virtual machine. QEMU logs the bytes written to one of them, and exits when a
//! number is written to the other.
#![expect(unsafe_code, reason = "I/O ports need the instruction `out`")]

use std::{arch::asm, io, process::ExitCode};

/// The port of QEMU's device `isa-debugcon`.
const REPORT_PORT: u16 = 0xe9;
/// The port of QEMU's device `isa-debug-exit`. QEMU's exit status is twice the number written, plus one.
const EXIT_PORT: u16 = 0xf4;
const PASSED: u8 = 0x10;
const FAILED: u8 = 0x11;

/// Access to the I/O ports. A value exists only if the kernel has granted this process access to them.
pub(crate) struct IoPorts(());

impl IoPorts {
    pub(crate) fn open() -> io::Result<Self> {
        // SAFETY: the call changes this process's I/O privilege level, and accesses no memory.
        let result = unsafe { nix::libc::iopl(3) };
        if result == 0 {
            Ok(Self(()))
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Reports an event.
    pub(crate) fn event(&self, event: &serde_json::Value) {
        self.write(&format!("{event}\n"));
    }

    /// Reports a line of a program's output.
    pub(crate) fn line(&self, line: &str) {
        self.write(&format!("| {line}\n"));
    }

    fn write(&self, text: &str) {
        for byte in text.bytes() {
            write_byte(REPORT_PORT, byte);
        }
    }

    /// Stops the machine; QEMU's exit status then depends on `passed`.
    pub(crate) fn exit(self, passed: bool) -> ExitCode {
        write_byte(EXIT_PORT, if passed { PASSED } else { FAILED });
        // Without the device `isa-debug-exit`, the machine stops when its init process exits.
        ExitCode::FAILURE
    }
}

fn write_byte(port: u16, byte: u8) {
    // SAFETY: `IoPorts::open` raised the I/O privilege level. The devices at both ports take one byte, and
    // access none of the machine's memory.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags));
    }
}
