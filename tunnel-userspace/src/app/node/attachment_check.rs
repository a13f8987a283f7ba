//! Checks from time to time that the programs are attached, in effect and pinned.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use tracing::{info, warn};

use crate::{
    bpf::{Attachment, AttachmentView},
    config::Config,
    drain,
    tasks::Tasks,
};

/// The number of check intervals after which a daemon without a further heartbeat does not count as running.
pub(super) const HEARTBEAT_CHECKS: u32 = 5;

/// Starts the task that checks the programs.
pub(super) fn start(
    attachment: Attachment,
    config: &Config,
    view: watch::Sender<AttachmentView>,
    tasks: &mut Tasks,
) {
    let every = config.bpf.check_interval;
    attachment.record_running(every * HEARTBEAT_CHECKS);
    tasks.start("programs", run(attachment, every, view, tasks.draining()));
}

/// Checks the programs at each interval until the drain begins, and publishes the result.
async fn run(
    attachment: Attachment,
    every: Duration,
    view: watch::Sender<AttachmentView>,
    mut draining: watch::Receiver<bool>,
) {
    let mut checks = interval(every);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            _ = checks.tick() => {}
        }
        let attachment = attachment.clone();
        let check = move || attachment.check(every * HEARTBEAT_CHECKS);
        let Ok(found) = spawn_blocking(check).await else {
            return;
        };
        view.send_if_modified(|old| {
            if *old == found {
                return false;
            }
            if old.problems != found.problems {
                match &*found.problems.join("; ") {
                    "" => info!(
                        programs = found.in_effect,
                        "all programs are in effect and pinned"
                    ),
                    problem => warn!(problem, "not all programs are in effect and pinned"),
                }
            }
            *old = found;
            true
        });
    }
}
