//! Datagrams that are larger than the links' packets, and so come in fragments.

use anyhow::{Context as _, Result};

use super::{
    ADDRESSES,
    errors::{Path, Place},
    netfilter::{TRACKING, load_rules},
};
use crate::support::{Dialer, ensure_eq};

/// Six fragments on links of 1,500 bytes.
const SIZE: usize = 8000;

/// Exchanges large datagrams with the Service, over the node port and the load balancer, in both families.
fn expect_large_datagrams(path: &Path) -> Result<()> {
    let [_, node, balancer, _] = ADDRESSES;
    for (_, vip, [_, dns]) in [node, balancer] {
        for (index, dialer) in [Dialer::V4, Dialer::V6].into_iter().enumerate() {
            let check = || -> Result<()> {
                let client = dialer.udp_socket(&path.client)?;
                let to = dialer.address(vip, dns);
                let backend = &path.backend()?.udp[index];
                for number in 0..3 {
                    let data = [number; SIZE];
                    let mut received = [0; SIZE + 1];
                    client.send_to(&data, to)?;
                    let (length, seen) = backend.recv_from(&mut received).context("no request")?;
                    ensure_eq("the request", &received[..length], &data[..])?;
                    backend.send_to(&received[..length], seen)?;
                    let (length, from) = client.recv_from(&mut received).context("no reply")?;
                    ensure_eq("the reply", &received[..length], &data[..])?;
                    ensure_eq("its sender", from, to)?;
                }
                Ok(())
            };
            check().with_context(|| format!("{vip:?}, {dialer:?}"))?;
        }
    }
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
