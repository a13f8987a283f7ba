use std::{convert::Infallible, sync::mpsc};

use super::*;

/// A guard on one link, which reports its calls.
struct ReportingGuard(mpsc::Sender<&'static str>);

impl UplinkGuard for ReportingGuard {
    type Error = Infallible;

    fn guard_uplinks(
        &mut self,
        _uplinks: &BTreeMap<u32, String>,
        _reattach: bool,
    ) -> Result<(), Infallible> {
        self.0.send("guard").expect("received");
        Ok(())
    }

    fn guarded_links(&self) -> BTreeSet<u32> {
        BTreeSet::from([2])
    }

    fn set_steering(&mut self, families: [bool; 2]) -> Result<(), Infallible> {
        assert_eq!(families, [false; 2]);
        self.0.send("disable").expect("received");
        Ok(())
    }

    fn remove_unused(&mut self, _uplinks: &BTreeMap<u32, String>) -> Result<(), Infallible> {
        self.0.send("remove").expect("received");
        Ok(())
    }
}

#[tokio::test]
async fn steering_is_disabled_before_what_an_earlier_process_left_is_removed() {
    let state = tempfile::tempdir().expect("a directory");
    let (calls, made) = mpsc::channel();

    let cleared = NetworkSetup::clear(ReportingGuard(calls), &record_path(state.path())).await;

    cleared.expect("cleared");
    assert_eq!(made.iter().collect::<Vec<_>>(), ["disable", "remove"]);
}
