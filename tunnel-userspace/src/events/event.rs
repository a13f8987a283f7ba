//! Builds Kubernetes Events.

use std::fmt::LowerHex;

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use tunnel_common::reason::Reason;

use crate::model::{Kind, ObjectId, ObjectName, ObjectWarning};

/// The name of the reporting controller. In kube-proxy's Events, it is `kube-proxy`.
const REPORTING_CONTROLLER: &str = "culvert";

/// The `action` in Events for warnings.
const ACTION: &str = "Program";

/// The namespace for Events about cluster-scoped objects. The kubelet and kube-proxy use the same one.
const CLUSTER_SCOPED_NAMESPACE: &str = "default";

/// The maximum lengths of a note and of a reporting instance's name, in bytes (Kubernetes
/// `pkg/apis/core/validation/events.go`).
const MAX_NOTE_BYTES: usize = 1024;
const MAX_INSTANCE_BYTES: usize = 128;

/// The maximum length of the object's name within an Event's name, which may not exceed 253 characters.
const MAX_OBJECT_NAME: usize = 200;

/// Builds the Event that reports that the daemon has started on a node. kube-proxy uses the same reason for
/// its start. The Event's name contains the time, so each start has its own Event.
pub(super) fn for_start(node: &str, now: Timestamp) -> Event {
    let node_id = ObjectId::new(Kind::Node, ObjectName::new("", node));
    Event {
        action: Some("Start".to_owned()),
        note: Some(format!("culvert {} starts", env!("CARGO_PKG_VERSION"))),
        reason: Some("Starting".to_owned()),
        type_: Some("Normal".to_owned()),
        ..event_about(&node_id, None, now.as_nanosecond(), node, now)
    }
}

/// Builds the Event for a warning. The Event has the same name on every node.
pub(super) fn for_warning(warning: &ObjectWarning, node: &str, now: Timestamp) -> Event {
    let uid = warning.uid.as_deref();
    let parts = [
        uid.unwrap_or_default(),
        warning.reason.label(),
        &warning.note,
    ];
    Event {
        action: Some(ACTION.to_owned()),
        note: Some(truncate(&warning.note, MAX_NOTE_BYTES).to_owned()),
        reason: Some(camel_case(warning.reason)),
        type_: Some("Warning".to_owned()),
        ..event_about(&warning.regarding, uid, hash(&parts.join("\n")), node, now)
    }
}

/// Builds an Event about an object, with the fields that all Events have in common. The Event's name ends
/// with `suffix`, which distinguishes it from other Events about the same object.
fn event_about(
    object: &ObjectId,
    uid: Option<&str>,
    suffix: impl LowerHex,
    node: &str,
    now: Timestamp,
) -> Event {
    let ObjectName { namespace, name } = &object.name;
    let namespace = Some(&**namespace).filter(|namespace| !namespace.is_empty());
    let stem = truncate(name, MAX_OBJECT_NAME).trim_end_matches(['-', '.']);
    // Events about Nodes use the Node's name as the UID, as the kubelet's Events do.
    let uid = if object.kind == Kind::Node {
        Some(&**name)
    } else {
        uid
    };
    Event {
        event_time: Some(MicroTime(now)),
        metadata: ObjectMeta {
            name: Some(format!("{stem}.{suffix:016x}")),
            namespace: Some(namespace.unwrap_or(CLUSTER_SCOPED_NAMESPACE).to_owned()),
            ..ObjectMeta::default()
        },
        regarding: Some(ObjectReference {
            api_version: Some(api_version(object.kind).to_owned()),
            kind: Some(object.kind.to_string()),
            name: Some(name.to_string()),
            namespace: namespace.map(str::to_owned),
            uid: uid.map(str::to_owned),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(REPORTING_CONTROLLER.to_owned()),
        reporting_instance: Some(truncate(node, MAX_INSTANCE_BYTES).to_owned()),
        ..Event::default()
    }
}

/// Computes the 64-bit FNV-1a hash. Unlike the standard library's hashes, it never changes between releases.
pub(crate) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Converts a reason's label to camel case, for example `frontend_conflict` to `FrontendConflict`.
fn camel_case(reason: Reason) -> String {
    let words = reason.label().split('_');
    words
        .flat_map(|word| {
            let (first, rest) = word.split_at(usize::from(!word.is_empty()));
            [first.to_ascii_uppercase(), rest.to_owned()]
        })
        .collect()
}

const fn api_version(kind: Kind) -> &'static str {
    match kind {
        Kind::Service | Kind::Node | Kind::ConfigMap | Kind::Pod => "v1",
        Kind::EndpointSlice => "discovery.k8s.io/v1",
        Kind::ServiceCidr => "networking.k8s.io/v1",
    }
}

/// Returns the longest prefix of `text` that is at most `most` bytes long.
pub(crate) fn truncate(text: &str, most: usize) -> &str {
    let end = text.floor_char_boundary(most);
    text.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::tests::conflict_warning;

    fn warning(note: &str) -> ObjectWarning {
        ObjectWarning {
            note: note.to_owned(),
            ..conflict_warning("web")
        }
    }

    #[test]
    fn an_event_is_in_the_namespace_of_its_object_or_in_the_default_one() {
        let of_a_node = ObjectWarning {
            uid: Some("unknown to kubelets".into()),
            ..ObjectWarning::for_node("edge-1", Reason::FrontendConflict, "full".to_owned())
        };
        for (warning, kind, namespace, own, uid) in [
            (warning("full"), "Service", "shop", Some("shop"), "1-2-3"),
            // Like the kubelet's Events, this one is in the `default` namespace and has the Node's name as
            // its UID.
            (of_a_node, "Node", "default", None, "edge-1"),
        ] {
            let event = for_warning(&warning, "edge-1", Timestamp::UNIX_EPOCH);

            let regarding = event.regarding.expect("an object");
            assert_eq!(event.metadata.namespace.as_deref(), Some(namespace));
            assert_eq!(regarding.kind.as_deref(), Some(kind));
            assert_eq!(regarding.namespace.as_deref(), own);
            assert_eq!(regarding.uid.as_deref(), Some(uid));
            assert_eq!(event.reason.as_deref(), Some("FrontendConflict"));
            assert_eq!(event.note.as_deref(), Some("full"));
        }
    }

    #[test]
    fn the_name_depends_on_the_warning_and_not_on_the_node() {
        let name = |note: &str, node: &str| {
            let event = for_warning(&warning(note), node, Timestamp::UNIX_EPOCH);
            event.metadata.name.expect("a name")
        };

        assert_eq!(name("one", "edge-1"), name("one", "edge-2"));
        assert_ne!(name("one", "edge-1"), name("other", "edge-1"));
        // The name must be the same in all releases, because nodes run different releases during an upgrade.
        assert_eq!(name("one", "edge-1"), "web.f092c021bc4b1e4c");
    }

    #[test]
    fn each_start_has_a_separate_event_about_the_node() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let event = for_start("edge-1", at(1_800_000_000));

        assert_eq!(event.reason.as_deref(), Some("Starting"));
        assert_eq!(event.type_.as_deref(), Some("Normal"));
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        let regarding = event.regarding.as_ref().expect("an object");
        assert_eq!(regarding.uid.as_deref(), Some("edge-1"));
        let next = for_start("edge-1", at(1_800_000_001));
        assert_ne!(event.metadata.name, next.metadata.name);
    }

    #[test]
    fn long_notes_and_names_are_truncated_to_the_limits_of_the_api_server() {
        let long = ObjectWarning {
            regarding: ObjectId::new(
                Kind::Node,
                ObjectName::new("", format!("{}.x", "a".repeat(199))),
            ),
            ..warning(&"ä".repeat(600))
        };

        let event = for_warning(&long, &"n".repeat(200), Timestamp::UNIX_EPOCH);

        assert_eq!(event.note.expect("a note").len(), 1024);
        assert_eq!(event.reporting_instance.expect("a node").len(), 128);
        let name = event.metadata.name.expect("a name");
        assert!(name.starts_with(&format!("{}.", "a".repeat(199))), "{name}");
        assert!(!name.contains(".."), "{name}");
    }
}
