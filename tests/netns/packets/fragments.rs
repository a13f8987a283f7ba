//! Datagrams that are larger than the links' packets, and so come in fragments.

use anyhow::{Context as _, Result, ensure};

use super::{
    ADDRESSES,
    errors::{Path, Place, send_until_received},
    netfilter::{TRACKING, load_rules},
};
use crate::support::{Dialer, Vip, ensure_eq};

/// Six fragments on links of 1,500 bytes.
const SIZE: usize = 8000;

/// Exchanges large datagrams with the Service, over the node port and the load balancer, in both families.
///
/// A fragment that overtakes the first one of its packet is left alone, and its datagram is lost. Between two CPUs of a busy
/// machine, this can happen.
fn expect_large_datagrams(path: &Path) -> Result<()> {
    let [_, node, balancer, _] = ADDRESSES;
    let mut lost = 0;
    let mut exchange = |vip: Vip, port, index: usize, dialer: Dialer| {
        let client = dialer.udp_socket(&path.client)?;
        let to = dialer.address(vip, port);
        let backend = &path.backend()?.udp[index];
        for _ in 0..3 {
            let (seen, requests) =
                send_until_received(&client, to, backend, SIZE).context("the request")?;
            let (from, replies) =
                send_until_received(backend, seen, &client, SIZE).context("the reply")?;
            ensure_eq("the sender of the reply", from, to)?;
            lost += requests + replies;
        }
        anyhow::Ok(())
    };
    for (_, vip, [_, dns]) in [node, balancer] {
        for (index, dialer) in [Dialer::V4, Dialer::V6].into_iter().enumerate() {
            exchange(vip, dns, index, dialer).with_context(|| format!("{vip:?}, {dialer:?}"))?;
        }
    }
    let overtaken = path.scene.node.reason_count("fragment_unmatched")?;
    ensure!(
        lost <= 2,
        "{lost} datagrams were lost, and {overtaken} fragments came before the first one"
    );
    Ok(())
}

#[test]
fn large_datagrams_pass_in_both_directions() -> Result<()> {
    for place in [Place::ThisNode, Place::OtherNode] {
        let path = Path::new(place)?;
        expect_large_datagrams(&path).with_context(|| format!("{place:?}"))?;
    }
    Ok(())
}

/// Connection tracking puts fragments together, and the stack cuts the packet again.
#[test]
#[ignore = "independent of the kernel: `large_datagrams_pass_in_both_directions` shows what the programs do"]
fn large_datagrams_pass_through_connection_tracking() -> Result<()> {
    for place in [Place::ThisNode, Place::OtherNode] {
        let path = Path::new(place)?;
        load_rules(&path.scene, "tracking.nft", TRACKING)?;
        expect_large_datagrams(&path).with_context(|| format!("{place:?}"))?;
    }
    Ok(())
}
