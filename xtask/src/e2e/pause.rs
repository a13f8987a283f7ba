//! Builds `pause`, the program that keeps a pod's namespaces alive: it waits for SIGTERM or SIGINT, then
//! exits.
//!
//! It starts in every pod, so it is small. No compiler is needed: the file consists of an ELF header, one
//! program header and a dozen instructions.

/// Address at which the segment is loaded.
const BASE: u64 = 0x40_0000;
/// Length of the ELF header and the program header, in bytes.
const HEADERS: usize = 64 + 56;

/// Calls `rt_sigprocmask(SIG_BLOCK, {SIGINT, SIGTERM}, NULL, 8)`, since the first process in a PID namespace
/// receives only signals that it blocks or handles; then `rt_sigtimedwait` until one arrives; then `exit(0)`.
const CODE: [u8; 58] = [
    0x68, 0x02, 0x40, 0x00, 0x00, // push   1 << (2 - 1) | 1 << (15 - 1)
    0x31, 0xff, // xor    edi, edi
    0x48, 0x89, 0xe6, // mov    rsi, rsp
    0x31, 0xd2, // xor    edx, edx
    0x41, 0xba, 0x08, 0x00, 0x00, 0x00, // mov    r10d, 8
    0xb8, 0x0e, 0x00, 0x00, 0x00, // mov    eax, 14
    0x0f, 0x05, // syscall
    0x48, 0x89, 0xe7, // mov    rdi, rsp
    0x31, 0xf6, // xor    esi, esi
    0x31, 0xd2, // xor    edx, edx
    0x41, 0xba, 0x08, 0x00, 0x00, 0x00, // mov    r10d, 8
    0xb8, 0x80, 0x00, 0x00, 0x00, // mov    eax, 128
    0x0f, 0x05, // syscall
    0x85, 0xc0, // test   eax, eax
    0x78, 0xe8, // js     back to `mov rdi, rsp`
    0x31, 0xff, // xor    edi, edi
    0xb8, 0x3c, 0x00, 0x00, 0x00, // mov    eax, 60
    0x0f, 0x05, // syscall
];

/// Returns the program as an ELF file for x86-64.
pub(super) fn program() -> Vec<u8> {
    let length = (HEADERS + CODE.len()) as u64;
    let entry = BASE + HEADERS as u64;
    let mut file = Vec::new();
    // The ELF header: 64 bits, little-endian, version 1, System V.
    file.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // An executable at a fixed address, for x86-64, version 1.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [entry, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    // No flags; the sizes of both headers; one segment; no sections.
    file.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    // The segment: loaded, readable and executable.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [0, BASE, BASE, length, length, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.extend(CODE);
    file
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _, os::unix::fs::PermissionsExt as _, process::Command};

    use super::*;
    use crate::progress::{self, Clock};

    /// The system call number of `rt_sigtimedwait`.
    const SIGTIMEDWAIT: &str = "128 ";

    #[test]
    fn it_waits_for_a_signal_and_exits_with_code_0() {
        let path = std::env::temp_dir().join(format!("culvert-pause-{}", std::process::id()));
        let mut file = fs::File::create(&path).expect("a file");
        file.write_all(&program()).expect("written");
        file.set_permissions(fs::Permissions::from_mode(0o755))
            .expect("a program");
        drop(file);

        let mut process = Command::new(&path).spawn().expect("started");
        let call = format!("/proc/{}/syscall", process.id());
        let waits = || fs::read_to_string(&call).is_ok_and(|it| it.starts_with(SIGTIMEDWAIT));
        let clock = Clock::start();
        while !waits() && clock.elapsed().as_secs() < 10 {
            std::thread::yield_now();
        }
        let has_waited = waits();
        let pid = process.id().to_string();
        assert!(progress::succeeds(Command::new("kill").arg(pid)));
        let status = process.wait().expect("waited");
        fs::remove_file(&path).expect("removed");

        assert!(has_waited);
        assert_eq!(status.code(), Some(0));
    }
}
