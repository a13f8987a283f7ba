//! The subcommand `culvert-lab tun`: one end of a link whose packets have no link-layer header.
#![expect(unsafe_code, reason = "ioctl(2) has no safe wrapper")]
#![expect(clippy::print_stdout, reason = "the program prints reports")]

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Write as _},
    mem,
    os::{fd::AsRawFd as _, unix::net::UnixDatagram},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use nix::libc::{self, ifreq};

/// The largest packet.
const MAX_PACKET: usize = 65_536;

/// The ends of the link.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The name of the device that this process creates.
    #[arg(long)]
    name: String,
    /// The socket at which this end receives packets from the other one.
    #[arg(long)]
    own: String,
    /// The socket at which the other end receives packets.
    #[arg(long)]
    peer: String,
}

/// Creates the device, and passes packets on between it and the other end, until this process is killed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let socket = UnixDatagram::bind(&options.own)?;
    let device = create(&options.name).context("cannot create the device")?;
    println!("created");
    let (from_device, from_socket) = (device.try_clone()?, socket.try_clone()?);
    let peer = options.peer.clone();
    thread::spawn(move || {
        // Packets that are sent before the other end exists, or faster than it reads, are lost.
        pass_on(
            |buffer| (&from_device).read(buffer),
            |packet| {
                drop(socket.send_to(packet, &peer));
            },
        )
    });
    pass_on(
        |buffer| from_socket.recv(buffer),
        |packet| {
            // The kernel refuses packets while the device is down.
            drop((&device).write(packet));
        },
    )
}

fn pass_on(receive: impl Fn(&mut [u8]) -> io::Result<usize>, send: impl Fn(&[u8])) -> Result<()> {
    let mut buffer = vec![0; MAX_PACKET];
    loop {
        let length = receive(&mut buffer)?;
        send(buffer.get(..length).context("a longer packet")?);
    }
}

/// Creates a tun device, which exists as long as the file is open.
fn create(name: &str) -> Result<File> {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: every bit pattern is valid.
    let mut request: ifreq = unsafe { mem::zeroed() };
    ensure!(name.len() < request.ifr_name.len(), "a long name");
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from)?;
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_TUN | libc::IFF_NO_PI)?;
    // SAFETY: the request is a valid `ifreq`.
    let created = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw const request) };
    ensure!(created == 0, io::Error::last_os_error());
    Ok(device)
}
