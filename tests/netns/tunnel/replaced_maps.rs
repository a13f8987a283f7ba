//! Tests that kubelets stay reachable while the daemon replaces the steering maps because of changed sizes or
//! an older layout.

use anyhow::{Result, ensure};
use tunnel_tests::tunnel_testbed::TunnelTestbed;

use super::expect_served;
use crate::{
    migration::{imitate_older_layout, older_directory},
    support::maps_directory,
};

#[test]
#[ignore = "independent of the kernel: `map_layouts` replaces the same maps under load"]
fn kubelets_are_reached_after_a_change_of_the_steering_map_size() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();

    for size in [64, 4, 64] {
        node.kill9()?;
        node.resize(|settings| settings.maps.steering = size)?;
        node.start()?;
        expect_served(&testbed)?;
        ensure!(!node.bpffs().join(maps_directory("-old")).exists());
    }

    // Four entries are needed: two ports at each of two addresses.
    node.kill9()?;
    node.resize(|settings| settings.maps.steering = 1)?;
    node.start()?;
    let log = node.logs();
    let warning = "bpf.maps.steering of 1 is too small";
    ensure!(log.contains(warning) && log.contains("needs 4"), "{log}");
    expect_served(&testbed)
}

#[test]
fn kubelets_are_reached_after_an_older_layout() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();

    for size in [16_384, 64] {
        node.kill9()?;
        imitate_older_layout(node)?;
        node.resize(|settings| settings.maps.steering = size)?;
        node.start()?;
        expect_served(&testbed)?;
        ensure!(!node.bpffs().join(older_directory("")).exists());
    }
    Ok(())
}
