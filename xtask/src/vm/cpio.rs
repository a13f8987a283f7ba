//! Writes the archives that the kernel unpacks at boot, in uncompressed cpio newc format.
//!
//! <https://docs.kernel.org/driver-api/early-userspace/buffer-format.html>

use std::{
    collections::BTreeSet,
    io::{self, Write},
};

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const DEVICE: u32 = 0o020_000;

/// An archive is padded to a multiple of this length, so that another one can follow it.
const BLOCK: u64 = 512;

/// An archive that is being written. Parent directories are added automatically.
#[derive(Debug)]
pub(super) struct Cpio<W> {
    out: W,
    written: u64,
    entries: u32,
    directories: BTreeSet<String>,
}

/// The fields of an entry's header that may be nonzero, except for the inode number and the name's length.
#[derive(Debug, Default)]
struct Header {
    mode: u32,
    links: u32,
    size: u32,
    device: (u32, u32),
}

impl<W: Write> Cpio<W> {
    pub(super) const fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            entries: 0,
            directories: BTreeSet::new(),
        }
    }

    pub(super) fn directory(&mut self, path: &str) -> io::Result<()> {
        let path = relative(path)?;
        self.parent_directories(path)?;
        self.directory_entry(path)
    }

    pub(super) fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.content_entry(path, FILE | mode, data)
    }

    pub(super) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.content_entry(path, LINK | 0o777, target.as_bytes())
    }

    /// Adds a character device.
    pub(super) fn device(&mut self, path: &str, mode: u32, number: (u32, u32)) -> io::Result<()> {
        let path = relative(path)?;
        self.parent_directories(path)?;
        let header = Header {
            mode: DEVICE | mode,
            links: 1,
            device: number,
            ..Header::default()
        };
        self.entry(path, &header, &[])
    }

    /// Writes the trailer of the archive, and returns the underlying writer.
    pub(super) fn finish(mut self) -> io::Result<W> {
        let header = Header {
            links: 1,
            ..Header::default()
        };
        self.entries = 0;
        self.entry("TRAILER!!!", &header, &[])?;
        self.pad(BLOCK)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn content_entry(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        let path = relative(path)?;
        self.parent_directories(path)?;
        let header = Header {
            mode,
            links: 1,
            size: length(data.len())?,
            ..Header::default()
        };
        self.entry(path, &header, data)
    }

    fn parent_directories(&mut self, path: &str) -> io::Result<()> {
        for (end, _) in path.match_indices('/') {
            self.directory_entry(&path[..end])?;
        }
        Ok(())
    }

    /// Writes a directory unless it has already been written.
    fn directory_entry(&mut self, path: &str) -> io::Result<()> {
        if !self.directories.insert(path.to_owned()) {
            return Ok(());
        }
        let header = Header {
            mode: DIRECTORY | 0o755,
            links: 2,
            ..Header::default()
        };
        self.entry(path, &header, &[])
    }

    fn entry(&mut self, name: &str, header: &Header, data: &[u8]) -> io::Result<()> {
        let (major, minor) = header.device;
        let name_size = length(name.len() + 1)?;
        // Inode, mode, owner, group, number of links, time, size, device that contains the file (major,
        // minor), device number of a device node (major, minor), length of the name, checksum.
        let fields = [
            self.entries,
            header.mode,
            0,
            0,
            header.links,
            0,
            header.size,
            0,
            0,
            major,
            minor,
            name_size,
            0,
        ];
        self.entries += 1;
        let fields: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        self.write(b"070701")?;
        self.write(fields.as_bytes())?;
        self.write(name.as_bytes())?;
        self.write(&[0])?;
        self.pad(4)?;
        self.write(data)?;
        self.pad(4)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Writes zeros until the length is a multiple of `unit` bytes.
    fn pad(&mut self, unit: u64) -> io::Result<()> {
        while !self.written.is_multiple_of(unit) {
            self.write(&[0])?;
        }
        Ok(())
    }
}

/// Returns a path without its leading slash; fails if it has an empty part, `.` or `..`.
fn relative(path: &str) -> io::Result<&str> {
    let path = path.strip_prefix('/').unwrap_or(path);
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        let message = format!("the path {path:?} has an empty part, `.` or `..`");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    Ok(path)
}

fn length(length: usize) -> io::Result<u32> {
    u32::try_from(length).map_err(|error| io::Error::new(io::ErrorKind::FileTooLarge, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected archive, derived by hand from the kernel's description of the format. The spaces are not
    /// part of it.
    const BYTES: &str = "\
        070701 00000000 000041ed 00000000 00000000 00000002 00000000 \
        00000000 00000000 00000000 00000000 00000000 00000004 00000000 dev\0\0\0 \
        070701 00000001 00002180 00000000 00000000 00000001 00000000 \
        00000000 00000000 00000000 00000005 00000001 0000000c 00000000 dev/console\0\0\0 \
        070701 00000002 000081ed 00000000 00000000 00000001 00000000 \
        00000005 00000000 00000000 00000000 00000000 00000005 00000000 init\0\0hello\0\0\0 \
        070701 00000003 0000a1ff 00000000 00000000 00000001 00000000 \
        00000004 00000000 00000000 00000000 00000000 00000003 00000000 sh\0\0\0\0init \
        070701 00000000 00000000 00000000 00000000 00000001 00000000 \
        00000000 00000000 00000000 00000000 00000000 0000000b 00000000 TRAILER!!!\0\0\0\0";

    #[test]
    fn an_archive_has_the_bytes_that_the_format_requires() {
        let mut cpio = Cpio::new(Vec::new());
        cpio.directory("/dev").expect("a directory");
        cpio.device("/dev/console", 0o600, (5, 1)).expect("a node");
        cpio.file("/init", 0o755, b"hello").expect("a file");
        cpio.link("/sh", "init").expect("a link");
        let bytes = cpio.finish().expect("an end");

        let mut expected = BYTES.replace(' ', "").into_bytes();
        expected.resize(1024, 0);
        assert_eq!(
            String::from_utf8(bytes).expect("text"),
            String::from_utf8(expected).expect("text")
        );
    }

    #[test]
    fn each_directory_is_written_once_and_before_its_content() {
        let mut cpio = Cpio::new(Vec::new());
        cpio.file("/a/b/c", 0o644, b"").expect("a file");
        cpio.file("/a/b/d", 0o644, b"").expect("a file");
        cpio.directory("/a/b").expect("a directory");
        let bytes = cpio.finish().expect("an end");

        let text = String::from_utf8(bytes).expect("text");
        let names: Vec<&str> = text
            .split("070701")
            .skip(1)
            .map(|entry| entry[13 * 8..].trim_end_matches('\0'))
            .collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d", "TRAILER!!!"]);
    }

    #[test]
    fn a_path_with_an_empty_or_relative_part_is_refused() {
        let mut cpio = Cpio::new(Vec::new());

        for path in ["", "/", "a//b", "../a", "a/./b", "a/"] {
            let error = cpio.file(path, 0o644, b"").expect_err(path);
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
