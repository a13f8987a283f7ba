//! The guard of the uplinks: a program at tc that drops what comes from outside for a steering
//! prefix. By a pinned link (tcx) where the kernel has them; else by a filter (clsact) with a fixed
//! priority and handle, and the pinned program as a note that it is there.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    mem::ManuallyDrop,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    maps::{Array, MapData},
    programs::{
        Program, ProgramError, SchedClassifier, TcAttachType, TcError, TestRun as _,
        TestRunOptions,
        tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact},
    },
};
use nix::net::if_::if_indextoname;
use tunnel_common::{names, steering::Steered};

use super::{probe::Features, sys};
use crate::net::Keeper;

/// The filter's place: before all others, under a handle that nobody counts up to.
const PRIORITY: u16 = 1;
const HANDLE: TcHandle = TcHandle::new(0, 0xc01e);

/// The entry of `host` that holds the families which are routed to the ingress.
const FAMILIES: u32 = 1;

/// How the pins of guards are named, before the index of the device.
const PREFIX: &str = "guard-";

/// An uplink could not be guarded.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} the guard of uplink {device}")]
pub struct GuardError {
    step: &'static str,
    device: String,
    #[source]
    source: io::Error,
}

/// The program, and where it is.
pub struct Guard {
    ebpf: Ebpf,
    links: PathBuf,
    features: Features,
    /// The devices on which this process has put it.
    placed: BTreeSet<u32>,
    host: Array<MapData, u64>,
    /// The families that the programs were told.
    admitted: Option<u64>,
}

impl Guard {
    pub(super) const fn new(
        ebpf: Ebpf,
        host: Array<MapData, u64>,
        links: PathBuf,
        features: Features,
    ) -> Self {
        Self {
            ebpf,
            links,
            features,
            placed: BTreeSet::new(),
            host,
            admitted: None,
        }
    }

    fn program(&mut self) -> io::Result<&mut SchedClassifier> {
        match self.ebpf.program_mut(names::GUARD) {
            Some(Program::SchedClassifier(program)) => Ok(program),
            _ => Err(io::Error::other("the object has no guard")),
        }
    }

    /// Runs the program on a frame and gives its verdict: -1 to pass, 2 to drop.
    ///
    /// # Errors
    ///
    /// The kernel refused.
    pub fn run(&mut self, frame: &[u8]) -> io::Result<i32> {
        let options = TestRunOptions {
            data_in: Some(frame),
            ..TestRunOptions::default()
        };
        let result = self.program()?.test_run(options).map_err(to_io)?;
        Ok(result.return_value.cast_signed())
    }

    fn put(&mut self, device: u32, name: &str) -> Result<(), GuardError> {
        let pin = self.links.join(format!("{PREFIX}{device}"));
        let put = if self.features.tcx {
            self.put_link(device, &pin)
        } else {
            self.put_filter(name, &pin)
        };
        put.map_err(|source| GuardError {
            step: "attach",
            device: name.to_owned(),
            source,
        })
    }

    fn put_link(&mut self, device: u32, pin: &Path) -> io::Result<()> {
        let program = self.program()?.fd().map_err(to_io)?;
        if let Some(link) = open(pin)? {
            if sys::tcx_device(link.as_fd())? == Some(device) {
                return sys::update_link(link.as_fd(), program);
            }
            fs::remove_file(pin)?;
        }
        let link = sys::create_tcx_link(program.as_fd(), device)?;
        sys::pin(link.as_fd(), pin)
    }

    fn put_filter(&mut self, name: &str, pin: &Path) -> io::Result<()> {
        match qdisc_add_clsact(name) {
            Ok(()) => {}
            Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        let program = self.program()?;
        let there = place_of(name)?;
        // An attach that replaces fails where there is nothing to replace.
        let id = if let Ok(id) = program.attach_to_link(there) {
            id
        } else {
            let options = NlOptions {
                priority: PRIORITY,
                handle: HANDLE,
                classid: None,
            };
            let options = TcAttachOptions::Netlink(options);
            program
                .attach_with_options(name, TcAttachType::Ingress, options)
                .map_err(to_io)?
        };
        // The filter is to outlive this process; a link that is dropped takes it off.
        let _stays = ManuallyDrop::new(program.take_link(id).map_err(to_io)?);
        // The note comes after the filter: one without the other is put there again.
        if open(pin)?.is_some() {
            fs::remove_file(pin)?;
        }
        sys::pin(program.fd().map_err(to_io)?.as_fd(), pin)
    }
}

impl Keeper for Guard {
    type Error = GuardError;

    fn keep(&mut self, uplinks: &BTreeMap<u32, String>, anew: bool) -> Result<(), GuardError> {
        self.placed.retain(|device| uplinks.contains_key(device));
        let mut first = Ok(());
        for (device, name) in uplinks {
            if !anew && self.placed.contains(device) {
                continue;
            }
            // One that can't be guarded leaves no other unguarded.
            match self.put(*device, name) {
                Ok(()) => {
                    if self.placed.insert(*device) {
                        tracing::info!(uplink = %name, "guarded: nothing from there reaches a steering prefix");
                    }
                }
                Err(error) => {
                    self.placed.remove(device);
                    first = first.and(Err(error));
                }
            }
        }
        first
    }

    fn guarded(&self) -> BTreeSet<u32> {
        pinned(&self.links)
            .into_iter()
            .map(|(device, _)| device)
            .collect()
    }

    fn admit(&mut self, [v4, v6]: [bool; 2]) -> Result<(), GuardError> {
        let bit = |is_there, bit| if is_there { bit } else { 0 };
        let families = bit(v4, Steered::ROUTED_V4) | bit(v6, Steered::ROUTED_V6);
        if self.admitted == Some(families) {
            return Ok(());
        }
        self.host
            .set(FAMILIES, families, 0)
            .map_err(|error| GuardError {
                step: "open the way behind",
                device: "any".to_owned(),
                source: io::Error::other(error),
            })?;
        self.admitted = Some(families);
        Ok(())
    }

    fn tidy(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), GuardError> {
        for (device, pin) in pinned(&self.links) {
            if uplinks.contains_key(&device) {
                continue;
            }
            let failed = |source| GuardError {
                step: "take off",
                device: device.to_string(),
                source,
            };
            remove_filter(&pin, device).map_err(failed)?;
            fs::remove_file(&pin).map_err(failed)?;
        }
        Ok(())
    }
}

/// Every pinned guard, with its device.
fn pinned(links: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(entries) = fs::read_dir(links) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| Some((device_of(entry.file_name().to_str()?)?, entry.path())))
        .collect()
}

/// The device that a pin of that name guards; nothing if it is no guard.
pub(super) fn device_of(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

/// Whether a pin is a guard of that device: a link at tc, of it or of one that is gone, or the note
/// of a filter.
pub(super) fn is_guard(pin: &Path, device: u32) -> io::Result<bool> {
    let object = sys::open_pin(pin)?;
    if let Some(found) = sys::tcx_device(object.as_fd())? {
        return Ok(found == device || found == 0);
    }
    sys::is_classifier(object.as_fd(), names::GUARD)
}

/// Takes off the filter that a pin is the note of, if it is one and the device is there.
pub(super) fn remove_filter(pin: &Path, device: u32) -> io::Result<()> {
    let object = sys::open_pin(pin)?;
    if !sys::is_classifier(object.as_fd(), names::GUARD)? {
        return Ok(());
    }
    // Of a device that is gone nix gives an empty name: it takes only -1 for a failure.
    let name = if_indextoname(device).unwrap_or_default();
    if name.is_empty() {
        return Ok(());
    }
    let there = place_of(&name.to_string_lossy())?;
    // It may be gone already.
    if let Err(error) = aya::programs::links::Link::detach(there) {
        tracing::debug!(%error, device, "no filter to take off");
    }
    Ok(())
}

fn place_of(name: &str) -> io::Result<SchedClassifierLink> {
    SchedClassifierLink::attached(name, TcAttachType::Ingress, PRIORITY, HANDLE, None)
}

fn open(pin: &Path) -> io::Result<Option<std::os::fd::OwnedFd>> {
    match sys::open_pin(pin) {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn to_io(error: ProgramError) -> io::Error {
    if let ProgramError::SyscallError(error) = error {
        error.io_error
    } else {
        io::Error::other(error)
    }
}
