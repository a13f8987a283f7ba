//! Detects uplinks, which are links that lead outside the node. A link is an uplink unless it is known to
//! lead to pods on this node, so that links of unknown kinds are guarded.

use std::collections::{BTreeMap, BTreeSet};

/// The attributes of a link that decide whether it is an uplink.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) kind: LinkKind,
    /// The index of the bridge that the link is a port of, if any.
    pub(super) bridge: Option<u32>,
}

/// The kind of a link. All but `Other` may lead to pods.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LinkKind {
    Loopback,
    /// A veth or netkit link whose peer is in another network namespace.
    Pair,
    Bridge,
    Other,
}

/// The links, classified by whether they lead outside the node.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct ClassifiedLinks {
    /// The names of the uplinks, by link index.
    pub(super) uplinks: BTreeMap<u32, String>,
    /// The indices of the inside links, which don't lead outside the node.
    pub(super) inside_links: BTreeSet<u32>,
    /// A configured uplink name that no link has.
    pub(super) missing: Option<String>,
}

/// Classifies the links. The uplinks are the `configured` links, or, if none are configured, all links that
/// don't lead to pods. Loopback, pairs into other namespaces, and bridges whose ports are all such pairs
/// count as leading to pods, unless they are used by a route via a gateway (`gateways`) or were uplinks
/// earlier (`former_uplinks`). While no link has one of the configured names, links that seem to lead outside
/// are neither uplinks nor inside links.
pub(super) fn classify(
    links: &[Link],
    gateways: &BTreeSet<u32>,
    configured: &[String],
    former_uplinks: &BTreeSet<u32>,
) -> ClassifiedLinks {
    let seems_outside =
        |link: &Link| !is_inside(link, links, gateways) || former_uplinks.contains(&link.index);
    let is_there = |name: &String| links.iter().any(|link| link.name == *name);
    let missing = configured.iter().find(|name| !is_there(name)).cloned();
    let is_uplink = |link: &Link| {
        if configured.is_empty() {
            seems_outside(link)
        } else {
            configured.contains(&link.name)
        }
    };
    let is_outside = |link: &Link| is_uplink(link) || missing.is_some() && seems_outside(link);
    ClassifiedLinks {
        uplinks: links
            .iter()
            .filter(|link| is_uplink(link))
            .map(|link| (link.index, link.name.clone()))
            .collect(),
        inside_links: links
            .iter()
            .filter(|link| !is_outside(link))
            .map(|link| link.index)
            .collect(),
        missing,
    }
}

fn is_inside(link: &Link, links: &[Link], gateways: &BTreeSet<u32>) -> bool {
    match link.kind {
        LinkKind::Loopback => true,
        LinkKind::Pair => {
            !gateways.contains(&link.index) && !has_outside_bridge(link, links, gateways)
        }
        LinkKind::Bridge => is_inner_bridge(link, links, gateways),
        LinkKind::Other => false,
    }
}

/// Returns true if a link is a port of a bridge that is used by a route via a gateway.
fn has_outside_bridge(link: &Link, links: &[Link], gateways: &BTreeSet<u32>) -> bool {
    let bridge = links.iter().find(|other| Some(other.index) == link.bridge);
    bridge.is_some_and(|bridge| gateways.contains(&bridge.index))
}

fn is_inner_bridge(bridge: &Link, links: &[Link], gateways: &BTreeSet<u32>) -> bool {
    let mut ports = links
        .iter()
        .filter(|port| port.bridge == Some(bridge.index));
    !gateways.contains(&bridge.index) && ports.all(|port| port.kind == LinkKind::Pair)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, kind: LinkKind, bridge: Option<u32>) -> Link {
        Link {
            index,
            name: format!("link{index}"),
            kind,
            bridge,
        }
    }

    #[test]
    fn loopback_and_links_to_pods_are_inside_and_all_others_are_uplinks() {
        let all_links = [
            link(1, LinkKind::Loopback, None),
            link(2, LinkKind::Other, None),
            link(3, LinkKind::Pair, None),
            link(4, LinkKind::Bridge, None),
            link(5, LinkKind::Pair, Some(4)),
            link(6, LinkKind::Other, Some(4)),
        ];
        let rows: [(_, [&[u32]; 4]); 6] = [
            ("loopback and a pair", [&[1, 2, 3], &[2], &[], &[2]]),
            ("a pair before a gateway", [&[3, 5], &[3], &[], &[3]]),
            ("a former uplink", [&[1, 3], &[], &[3], &[3]]),
            ("a bridge of pods", [&[4, 5], &[], &[], &[]]),
            ("a bridge with a way out", [&[4, 5, 6], &[], &[], &[4, 6]]),
            ("a bridge at a gateway", [&[4, 5], &[4], &[], &[4, 5]]),
        ];
        for (claim, [there, gateways, former, uplinks]) in rows {
            let set = |indices: &[u32]| BTreeSet::from_iter(indices.iter().copied());
            let is_there = |link: &&Link| there.contains(&link.index);
            let links: Vec<_> = all_links.iter().filter(is_there).cloned().collect();

            let found = classify(&links, &set(gateways), &[], &set(former));

            let found_uplinks: Vec<_> = found.uplinks.into_keys().collect();
            assert_eq!(found_uplinks, uplinks, "{claim}");
            assert_eq!(found.inside_links, &set(there) - &set(uplinks), "{claim}");
        }
    }

    #[test]
    fn the_config_overrides_the_detection() {
        let links = [
            link(1, LinkKind::Loopback, None),
            link(2, LinkKind::Other, None),
            link(3, LinkKind::Pair, None),
        ];
        let configured = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            classify(&links, &BTreeSet::new(), &names, &BTreeSet::new())
        };

        let found = configured(&["link3"]);
        assert_eq!(found.uplinks, BTreeMap::from([(3, "link3".to_owned())]));
        assert_eq!(found.inside_links, BTreeSet::from([1, 2]));

        // While link9 is missing, link2 may be link9 under another name, so it is neither an uplink nor an
        // inside link.
        let found = configured(&["link3", "link9"]);
        assert_eq!(found.missing.as_deref(), Some("link9"));
        assert_eq!(found.uplinks, BTreeMap::from([(3, "link3".to_owned())]));
        assert_eq!(found.inside_links, BTreeSet::from([1]));
    }
}
