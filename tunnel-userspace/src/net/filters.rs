//! Lists the filters of others on uplinks (clsact). They run beside Culvert's programs.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "few of the kernel's attributes matter here"
)]

use std::collections::BTreeMap;

use rtnetlink::packet_route::tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption};

use super::netlink::RouteSocket;

/// The minor number of the handle of Culvert's own filters, which the kernel never allocates itself.
pub const FILTER_HANDLE: u16 = 0xc01e;

/// Describes the filters of others on uplinks.
pub(super) async fn others(kernel: &RouteSocket, uplinks: &BTreeMap<u32, String>) -> Vec<String> {
    let mut others = Vec::new();
    for (device, name) in uplinks {
        for (is_ingress, direction) in [(true, "ingress"), (false, "egress")] {
            // A device that was just removed has no filters.
            let filters = kernel.filters(*device, is_ingress).await;
            let found = filters.unwrap_or_default();
            let found = found.iter().filter_map(description_of_other);
            others.extend(found.map(|filter| format!("{filter} on {name} ({direction})")));
        }
    }
    others
}

/// Describes a filter, unless it is one of Culvert's own or only the head of a list of filters.
fn description_of_other(filter: &TcMessage) -> Option<String> {
    let own = TcHandle {
        major: 0,
        minor: FILTER_HANDLE,
    };
    if filter.header.handle == own || filter.header.handle == TcHandle::UNSPEC {
        return None;
    }
    let mut description = None;
    for attribute in &filter.attributes {
        match attribute {
            TcAttribute::Kind(kind) if description.is_none() => {
                description = Some(format!("filter {kind}"));
            }
            TcAttribute::Options(options) => {
                for option in options {
                    if let TcOption::Bpf(TcFilterBpfOption::ProgName(name)) = option {
                        description = Some(format!("program {name}"));
                    }
                }
            }
            _ => {}
        }
    }
    description
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(handle: u16, kind: &str, program: Option<&str>) -> Option<String> {
        let mut message = TcMessage::default();
        message.header.handle.minor = handle;
        message.attributes.push(TcAttribute::Kind(kind.to_owned()));
        let name = |name: &str| TcOption::Bpf(TcFilterBpfOption::ProgName(name.to_owned()));
        let options = program.map(|program| TcAttribute::Options(vec![name(program)]));
        message.attributes.extend(options);
        description_of_other(&message)
    }

    #[test]
    fn filters_of_others_are_described_and_own_ones_and_heads_of_lists_are_not() {
        assert_eq!(
            filter(1, "matchall", None).as_deref(),
            Some("filter matchall")
        );
        assert_eq!(
            filter(1, "bpf", Some("cil_from_netdev")).as_deref(),
            Some("program cil_from_netdev")
        );
        assert_eq!(filter(FILTER_HANDLE, "bpf", Some("in")), None);
        assert_eq!(filter(0, "bpf", None), None);
    }
}
