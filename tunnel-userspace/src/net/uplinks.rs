//! Detection of uplinks, which are links that lead outside. A link is an uplink unless it is known to lead
//! to pods of this node, so that links of an unknown kind are guarded.

use std::collections::{BTreeMap, BTreeSet};

/// The attributes of a link that decide if it is an uplink.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) kind: Kind,
    /// The index of the bridge that the link is a port of.
    pub(super) bridge: Option<u32>,
}

/// The kind of a link. All but `Other` may lead to pods.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Loopback,
    /// A veth or netkit link whose peer is in another network namespace.
    Pair,
    Bridge,
    Other,
}

/// The links that lead outside, and the links that lead to pods.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Found {
    /// The names of the uplinks, by index.
    pub(super) uplinks: BTreeMap<u32, String>,
    /// The indices of the inside links, which don't lead outside.
    pub(super) inside: BTreeSet<u32>,
    /// A configured name without a link.
    pub(super) missing: Option<String>,
}

/// Classifies the links. Uplinks are the configured links (`named`), or else all links that don't lead to
/// pods. Loopback, pairs into other namespaces, and bridges of only such pairs lead to pods, unless a route
/// via a gateway uses them (`gateways`), or they were uplinks before (`known`). While a configured name has
/// no link, links that seem to lead outside are neither uplinks nor inside links.
pub(super) fn find(
    links: &[Link],
    gateways: &BTreeSet<u32>,
    named: &[String],
    known: &BTreeSet<u32>,
) -> Found {
    let seems_outside =
        |link: &Link| !is_inside(link, links, gateways) || known.contains(&link.index);
    let is_there = |name: &String| links.iter().any(|link| link.name == *name);
    let missing = named.iter().find(|name| !is_there(name)).cloned();
    let is_uplink = |link: &Link| {
        if named.is_empty() {
            seems_outside(link)
        } else {
            named.contains(&link.name)
        }
    };
    let is_outside = |link: &Link| is_uplink(link) || missing.is_some() && seems_outside(link);
    Found {
        uplinks: links
            .iter()
            .filter(|link| is_uplink(link))
            .map(|link| (link.index, link.name.clone()))
            .collect(),
        inside: links
            .iter()
            .filter(|link| !is_outside(link))
            .map(|link| link.index)
            .collect(),
        missing,
    }
}

fn is_inside(link: &Link, links: &[Link], gateways: &BTreeSet<u32>) -> bool {
    match link.kind {
        Kind::Loopback => true,
        Kind::Pair => !gateways.contains(&link.index) && !has_outside_bridge(link, links, gateways),
        Kind::Bridge => is_inner_bridge(link, links, gateways),
        Kind::Other => false,
    }
}

/// Returns true if a link is a port of a bridge that a route via a gateway uses.
fn has_outside_bridge(link: &Link, links: &[Link], gateways: &BTreeSet<u32>) -> bool {
    let bridge = links.iter().find(|other| Some(other.index) == link.bridge);
    bridge.is_some_and(|bridge| gateways.contains(&bridge.index))
}

fn is_inner_bridge(bridge: &Link, links: &[Link], gateways: &BTreeSet<u32>) -> bool {
    let mut ports = links
        .iter()
        .filter(|port| port.bridge == Some(bridge.index));
    !gateways.contains(&bridge.index) && ports.all(|port| port.kind == Kind::Pair)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, kind: Kind, bridge: Option<u32>) -> Link {
        Link {
            index,
            name: format!("link{index}"),
            kind,
            bridge,
        }
    }

    #[test]
    fn loopback_and_ways_into_pods_are_inside_and_all_else_is_an_uplink() {
        let known = [
            link(1, Kind::Loopback, None),
            link(2, Kind::Other, None),
            link(3, Kind::Pair, None),
            link(4, Kind::Bridge, None),
            link(5, Kind::Pair, Some(4)),
            link(6, Kind::Other, Some(4)),
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
            let links: Vec<_> = known.iter().filter(is_there).cloned().collect();

            let found = find(&links, &set(gateways), &[], &set(former));

            let found_uplinks: Vec<_> = found.uplinks.into_keys().collect();
            assert_eq!(found_uplinks, uplinks, "{claim}");
            assert_eq!(found.inside, &set(there) - &set(uplinks), "{claim}");
        }
    }

    #[test]
    fn the_config_has_the_last_word() {
        let links = [
            link(1, Kind::Loopback, None),
            link(2, Kind::Other, None),
            link(3, Kind::Pair, None),
        ];
        let named = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            find(&links, &BTreeSet::new(), &names, &BTreeSet::new())
        };

        let found = named(&["link3"]);
        assert_eq!(found.uplinks, BTreeMap::from([(3, "link3".to_owned())]));
        assert_eq!(found.inside, BTreeSet::from([1, 2]));

        // A link may have been renamed, so link2 is neither an uplink nor inside while link9 is missing.
        let found = named(&["link3", "link9"]);
        assert_eq!(found.missing.as_deref(), Some("link9"));
        assert_eq!(found.uplinks, BTreeMap::from([(3, "link3".to_owned())]));
        assert_eq!(found.inside, BTreeSet::from([1]));
    }
}
