//! Two I/O ports of the machine: QEMU logs the bytes of one, and ends the machine with the number
//! written to the other.
#![expect(unsafe_code, reason = "ports of the machine are no files")]

use std::{arch::asm, io, process::ExitCode};

/// `isa-debugcon` of QEMU.
const REPORT: u16 = 0xe9;
/// `isa-debug-exit` of QEMU, whose exit status is twice the number plus one.
const END: u16 = 0xf4;
const PASSED: u8 = 0x10;
const FAILED: u8 = 0x11;

/// The ports, once this process may use them.
pub(crate) struct Port(());

impl Port {
    pub(crate) fn open() -> io::Result<Self> {
        // SAFETY: takes a number, and changes what this process may do, not its memory.
        let done = unsafe { nix::libc::iopl(3) };
        if done == 0 {
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
            out(REPORT, byte);
        }
    }

    /// Ends the machine with the outcome.
    pub(crate) fn end(self, passed: bool) -> ExitCode {
        out(END, if passed { PASSED } else { FAILED });
        // A machine without that port runs on until its init process exits.
        ExitCode::FAILURE
    }
}

fn out(port: u16, byte: u8) {
    // SAFETY: `Port::open` got the right to use ports; the two used here are devices that take a
    // byte and touch no memory of the machine.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags));
    }
}
