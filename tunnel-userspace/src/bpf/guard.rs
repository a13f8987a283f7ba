//! Attaches the guard to uplinks: a program at tc that drops packets from outside to a steering prefix.
//!
//! Kernels with tcx attach it by a pinned link. Others attach it as a filter of clsact, with a fixed
//! priority and handle; the pinned program then marks that there is a filter.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    mem::ManuallyDrop,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use aya::programs::{
    SchedClassifier, TcAttachType, TcError, TestRun as _, TestRunOptions,
    tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact},
};
use nix::net::if_::if_indextoname;
use tunnel_common::{steering::SteeringRecord, table::GUARD};

use super::{
    attach::{self, AttachResult},
    probe::Features,
    programs::{Programs, to_io_error},
    sys::{self, LinkTarget, MapHandle},
};
use crate::net::UplinkGuard;

/// The priority of the filter, which runs it before all others, and a handle that the kernel never
/// allocates itself.
const PRIORITY: u16 = 1;
const HANDLE: TcHandle = TcHandle::new(0, 0xc01e);

/// The entry of the map `host` with the address families whose steering prefix has a route.
const ROUTED_FAMILIES: u32 = 1;

/// The error of attaching or detaching the guard, or of enabling the ingress.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub struct GuardError {
    step: String,
    #[source]
    source: io::Error,
}

fn failed(step: String) -> impl FnOnce(io::Error) -> GuardError {
    move |source| GuardError { step, source }
}

/// The guard, and the devices to which it is attached.
pub struct Guard {
    programs: Programs,
    links: PathBuf,
    features: Features,
    /// The devices to which this process has attached the guard.
    attached: BTreeSet<u32>,
    host: MapHandle<u32, u64>,
    /// The address families that were last written to `host`.
    routed_families: Option<u64>,
}

impl Guard {
    pub(super) const fn new(
        programs: Programs,
        host: MapHandle<u32, u64>,
        links: PathBuf,
        features: Features,
    ) -> Self {
        Self {
            programs,
            links,
            features,
            attached: BTreeSet::new(),
            host,
            routed_families: None,
        }
    }

    /// Runs the program on a frame, and returns its verdict: -1 to pass, 2 to drop.
    ///
    /// # Errors
    ///
    /// The kernel can't run the program.
    pub fn run(&self, frame: &[u8]) -> io::Result<i32> {
        let options = TestRunOptions {
            data_in: Some(frame),
            ..TestRunOptions::default()
        };
        self.programs.with_classifier(&GUARD, |program| {
            let result = program.test_run(options).map_err(to_io_error)?;
            Ok(result.return_value.cast_signed())
        })
    }

    fn attach_to(&self, device: u32, name: &str) -> Result<(), GuardError> {
        let pin = self.links.join(attach::pin_name(&GUARD, device));
        let attached = if self.features.tcx {
            self.attach_link(device, &pin)
        } else {
            self.attach_filter(name, &pin)
        };
        attached.map_err(failed(format!("attach the guard to uplink {name}")))
    }

    fn attach_link(&self, device: u32, pin: &Path) -> io::Result<()> {
        let program = self.programs.fd(&GUARD)?;
        let attached = attach::attach_program(&program, &GUARD, LinkTarget::Device(device), pin);
        match attached.map_err(|(_, error)| error)? {
            AttachResult::Replaced => Ok(()),
            AttachResult::Created(link) => attach::replace_pin(link.as_fd(), pin),
        }
    }

    fn attach_filter(&self, name: &str, pin: &Path) -> io::Result<()> {
        match qdisc_add_clsact(name) {
            Ok(()) => {}
            Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        let existing = filter_link(name)?;
        let options = TcAttachOptions::Netlink(NlOptions {
            priority: PRIORITY,
            handle: HANDLE,
            classid: None,
        });
        let filter = |program: &mut SchedClassifier| {
            // Fails if there is no filter to replace.
            let id = program.attach_to_link(existing).or_else(|_no_filter| {
                program.attach_with_options(name, TcAttachType::Ingress, options)
            });
            let id = id.map_err(to_io_error)?;
            // The filter must outlive this process, and dropping the link would remove it.
            let _kept = ManuallyDrop::new(program.take_link(id).map_err(to_io_error)?);
            Ok(())
        };
        self.programs.with_classifier(&GUARD, filter)?;
        // Pinned after the filter is attached. If one of the two is missing, both are created again.
        attach::replace_pin(self.programs.fd(&GUARD)?.as_fd(), pin)
    }
}

impl UplinkGuard for Guard {
    type Error = GuardError;

    fn guard_uplinks(
        &mut self,
        uplinks: &BTreeMap<u32, String>,
        reattach: bool,
    ) -> Result<(), GuardError> {
        self.attached.retain(|device| uplinks.contains_key(device));
        let mut first = Ok(());
        for (device, name) in uplinks {
            if !reattach && self.attached.contains(device) {
                continue;
            }
            // Continues after a failure, so that all other devices are guarded.
            match self.attach_to(*device, name) {
                Ok(()) => {
                    if self.attached.insert(*device) {
                        tracing::info!(uplink = %name, "guard attached: it drops packets from this uplink to steering prefixes");
                    }
                }
                Err(error) => {
                    self.attached.remove(device);
                    first = first.and(Err(error));
                }
            }
        }
        first
    }

    fn guarded_links(&self) -> BTreeSet<u32> {
        let pinned = pinned_guards(&self.links).into_iter();
        pinned.map(|(device, _)| device).collect()
    }

    fn set_steering(&mut self, [v4, v6]: [bool; 2]) -> Result<(), GuardError> {
        let [v4, v6] = [v4, v6].map(u64::from);
        let families = (v4 * SteeringRecord::ROUTED_V4) | (v6 * SteeringRecord::ROUTED_V6);
        if self.routed_families == Some(families) {
            return Ok(());
        }
        let written = self.host.write(&ROUTED_FAMILIES, &families);
        let written = written.map_err(io::Error::other);
        written.map_err(failed(
            "write the routed address families to the map host".to_owned(),
        ))?;
        self.routed_families = Some(families);
        Ok(())
    }

    fn remove_unused(&mut self, uplinks: &BTreeMap<u32, String>) -> Result<(), GuardError> {
        for (device, pin) in pinned_guards(&self.links) {
            if uplinks.contains_key(&device) {
                continue;
            }
            let removed = remove_filter(&pin, device).and_then(|()| fs::remove_file(&pin));
            removed.map_err(failed(format!(
                "detach the guard from the device with index {device}"
            )))?;
        }
        Ok(())
    }
}

/// Returns the device and the pin of each guard.
fn pinned_guards(links: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(entries) = fs::read_dir(links) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let (program, device) = attach::parse_pin_name(entry.file_name().to_str()?)?;
            Some((device?, entry.path())).filter(|_| *program == GUARD)
        })
        .collect()
}

/// Returns true if a pin is the guard of a device: a tcx link to it, a tcx link to a removed device, or the
/// pinned program of a filter.
pub(super) fn is_guard(pin: &Path, device: u32) -> io::Result<bool> {
    let object = sys::open_pin(pin)?;
    if let Some(found) = sys::link_info(object.as_fd())? {
        let wanted = LinkTarget::Device(device).link_info(GUARD.hook);
        return Ok(found == wanted
            || found
                == sys::LinkInfo {
                    target_id: 0,
                    ..wanted
                });
    }
    sys::is_classifier(object.as_fd(), GUARD.name)
}

/// Removes the filter of a pinned program, if the pin is a program and the device exists.
pub(super) fn remove_filter(pin: &Path, device: u32) -> io::Result<()> {
    let object = sys::open_pin(pin)?;
    if !sys::is_classifier(object.as_fd(), GUARD.name)? {
        return Ok(());
    }
    // For a removed device nix returns an empty name instead of an error.
    let name = if_indextoname(device).unwrap_or_default();
    if name.is_empty() {
        return Ok(());
    }
    let existing = filter_link(&name.to_string_lossy())?;
    // The filter may be removed already.
    if let Err(error) = aya::programs::links::Link::detach(existing) {
        tracing::debug!(%error, device, "no filter to detach");
    }
    Ok(())
}

fn filter_link(name: &str) -> io::Result<SchedClassifierLink> {
    SchedClassifierLink::attached(name, TcAttachType::Ingress, PRIORITY, HANDLE, None)
}
