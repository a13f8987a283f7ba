//! Attaches the guard to uplinks. The guard is a tc program that drops packets that arrive from outside and
//! are addressed to a steering prefix.
//!
//! On kernels with tcx, it is attached through a pinned link. On others, it is attached as a clsact filter
//! with a fixed priority and handle; the program is then pinned to record that the filter exists.

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
    attach::{self, HeldLink},
    attachment::Attachment,
    probe::Features,
    programs::{Programs, to_io_error},
    sys::{self, LinkTarget, MapHandle},
};
use crate::net::UplinkGuard;

/// The filter's priority, which makes it run before all others, and its handle, which the kernel never
/// allocates itself.
const PRIORITY: u16 = 1;
const HANDLE: TcHandle = TcHandle::new(0, 0xc01e);

/// The index of the entry in the map `host` that holds the address families whose steering prefix has a
/// route.
const ROUTED_FAMILIES: u32 = 1;

/// An error that can occur when attaching or detaching the guard, or when enabling steering.
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

/// The guard, and the devices that it is attached to.
pub struct Guard {
    programs: Programs,
    links: PathBuf,
    features: Features,
    /// The devices to which this process has attached the guard, each with its link. A filter has no link.
    attached: BTreeMap<u32, Option<HeldLink>>,
    /// The view that shows what was restored.
    attachment: Option<Attachment>,
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
            attached: BTreeMap::new(),
            attachment: None,
            host,
            routed_families: None,
        }
    }

    /// Makes the guard show what it restores in the view of the attached programs.
    #[must_use]
    pub fn with_attachment(self, attachment: Attachment) -> Self {
        Self {
            attachment: Some(attachment),
            ..self
        }
    }

    /// Runs the guard program on a frame, and returns the verdict: -1 to pass, 2 to drop.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't run the program.
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

    /// Attaches the guard to a device, or repairs its link. A link stays attached even if it can't be pinned.
    fn attach_to(&mut self, device: u32, name: &str) -> Result<(), GuardError> {
        let pin = self.links.join(attach::pin_name(&GUARD, device));
        let attached = if self.features.tcx {
            self.attach_link(device, name, pin)
        } else {
            self.attach_filter(name, &pin)
                .map(|()| self.record_attached(device, name, None))
        };
        attached.map_err(failed(format!("attach the guard to uplink {name}")))
    }

    fn attach_link(&mut self, device: u32, name: &str, pin: PathBuf) -> io::Result<()> {
        let target = LinkTarget::Device(device);
        if let Some(Some(held)) = self.attached.get_mut(&device) {
            let restored = held.repair(target)?;
            for what in restored.into_iter().chain(held.repair_pin()?) {
                match &self.attachment {
                    Some(attachment) => attachment.record_restored(what),
                    None => tracing::warn!(what, "restored"),
                }
            }
            return Ok(());
        }
        let program = self.programs.fd(&GUARD)?;
        let attached = HeldLink::attach(&GUARD, program, target, pin);
        let (link, is_new) = attached.map_err(|(_, error)| error)?;
        let pinned = if is_new { link.pin() } else { Ok(()) };
        self.record_attached(device, name, Some(link));
        pinned
    }

    fn record_attached(&mut self, device: u32, name: &str, link: Option<HeldLink>) {
        if self.attached.insert(device, link).is_none() {
            tracing::info!(uplink = %name, "guard attached: it drops packets from this uplink to steering prefixes");
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
            // `attach_to_link` fails if there is no filter to replace.
            let id = program.attach_to_link(existing).or_else(|_no_filter| {
                program.attach_with_options(name, TcAttachType::Ingress, options)
            });
            let id = id.map_err(to_io_error)?;
            // The filter must outlive this process, but dropping the link would remove it.
            let _kept = ManuallyDrop::new(program.take_link(id).map_err(to_io_error)?);
            Ok(())
        };
        self.programs.with_classifier(&GUARD, filter)?;
        // The pin is created only after the filter is attached. If either is missing, both are created again.
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
        self.attached
            .retain(|device, _| uplinks.contains_key(device));
        let mut first = Ok(());
        for (device, name) in uplinks {
            if !reattach && self.attached.contains_key(device) {
                continue;
            }
            // Continues after a failure, so that all other devices are still guarded.
            if let Err(error) = self.attach_to(*device, name) {
                first = first.and(Err(error));
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

/// Returns the device index and the pin path of each pinned guard.
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

/// Returns true if a pin is the guard for a device: a tcx link to that device, a tcx link to a removed
/// device, or a filter's pinned program.
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

/// Removes the filter that runs a pinned program, if the pin is a program and the device exists.
pub(super) fn remove_filter(pin: &Path, device: u32) -> io::Result<()> {
    let object = sys::open_pin(pin)?;
    if !sys::is_classifier(object.as_fd(), GUARD.name)? {
        return Ok(());
    }
    // For a removed device, nix returns an empty name instead of an error.
    let name = if_indextoname(device).unwrap_or_default();
    if name.is_empty() {
        return Ok(());
    }
    let existing = filter_link(&name.to_string_lossy())?;
    // The filter may already have been removed.
    if let Err(error) = aya::programs::links::Link::detach(existing) {
        tracing::debug!(%error, device, "no filter to detach");
    }
    Ok(())
}

fn filter_link(name: &str) -> io::Result<SchedClassifierLink> {
    SchedClassifierLink::attached(name, TcAttachType::Ingress, PRIORITY, HANDLE, None)
}
