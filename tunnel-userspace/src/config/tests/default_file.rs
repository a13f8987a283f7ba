//! Tests for `default.yaml`, the config file that contains and explains the defaults.

use super::*;
use crate::{
    bpf::{KernelLog, KernelLogLevel},
    controller::ControllerSettings,
    identity::IdentityFiles,
};

#[test]
fn the_default_file_has_the_values_of_an_empty_file() {
    let empty = Config::parse("").expect("good");
    let documented = Config::parse(Config::default_file()).expect("good");

    assert_eq!(empty, documented);
}

#[test]
fn the_default_file_has_every_field() {
    let documented: Value = serde_saphyr::from_str_with_options(
        Config::default_file(),
        serde_saphyr::options! { emit_comments: false },
    )
    .expect("YAML");
    let defaults = serde_json::to_value(Config::parse("").expect("good")).expect("JSON");

    assert_eq!(field_paths(&documented, ""), field_paths(&defaults, ""));
}

fn field_paths(value: &Value, path: &str) -> Vec<String> {
    let Some(map) = value.as_object() else {
        return vec![path.to_owned()];
    };
    let mut names: Vec<_> = map
        .iter()
        .flat_map(|(name, value)| field_paths(value, &format!("{path}.{name}")))
        .collect();
    names.sort();
    names
}

/// Returns the paths of the fields in a schema, including those in its sections.
fn properties(schema: &Value, path: &str) -> Vec<String> {
    // An optional section is `anyOf` the section's schema and null.
    let section = schema["anyOf"].get(0).unwrap_or(schema);
    let Some(map) = section["properties"].as_object() else {
        return vec![path.to_owned()];
    };
    let mut names: Vec<_> = map
        .iter()
        .flat_map(|(name, value)| properties(value, &format!("{path}.{name}")))
        .collect();
    names.sort();
    names
}

#[test]
fn the_schema_has_the_documented_fields_and_no_others() {
    let documented: Value = serde_saphyr::from_str_with_options(
        &uncommented(&[]),
        serde_saphyr::options! { emit_comments: false },
    )
    .expect("YAML");
    let schema: Value = serde_json::from_str(&schema::of_config()).expect("JSON");

    assert_eq!(properties(&schema, ""), field_paths(&documented, ""));
    assert_eq!(schema["additionalProperties"], json!(false));
}

#[test]
fn the_schema_next_to_the_page_on_configuration_is_that_of_this_version() {
    let committed = include_str!("../../../../docs/configuration.schema.json");

    // Not `assert_eq!`, which would print both schemas.
    assert!(
        committed.trim_end() == schema::of_config(),
        "write it again: culvert config schema > docs/configuration.schema.json"
    );
}

#[test]
fn the_page_on_configuration_contains_the_default_file() {
    let page = include_str!("../../../../docs/configuration.md");

    assert!(
        page.contains(Config::default_file()),
        "docs/configuration.md is out of date"
    );
}

/// Returns the default file with its commented-out fields enabled, except in the sections listed in `but`.
fn uncommented(but: &[&str]) -> String {
    let mut hidden = None;
    let mut text = String::new();
    for line in Config::default_file().lines() {
        let field = line.trim_start();
        let depth = line.len() - field.len();
        let field = field
            .strip_prefix('#')
            .filter(|rest| rest.starts_with(char::is_alphabetic));
        if let Some(field) = field {
            if hidden.is_none_or(|section| depth <= section) {
                let name = field.split(':').next().unwrap_or_default();
                hidden = but.contains(&name).then_some(depth);
            }
            if hidden.is_none() {
                text.push_str(&format!("{:depth$}{field}\n", ""));
            }
        } else {
            text.push_str(&format!("{line}\n"));
        }
    }
    text
}

/// Sets the fields for which the default file contains an example instead of a default.
fn with_examples(config: Config) -> Config {
    let kube = kube::KubeSettings {
        kubeconfig: Some("/etc/culvert/kubeconfig".into()),
        ..kube::KubeSettings::default()
    };
    let words = ["primary", "localhost"].map(ToOwned::to_owned);
    let kernel = KernelLog {
        program: "connect4".to_owned(),
        level: KernelLogLevel::default(),
    };
    Config {
        source: SourceConfig {
            file: Some(file::FileSettings::default()),
            kube: Some(kube),
        },
        service: ServiceConfig {
            node_port_addresses: Some(words.into()),
            ..ServiceConfig::default()
        },
        log: LogConfig {
            kernel: Some(kernel),
        },
        controller: ControllerSettings {
            deny_file: Some("/etc/culvert/deny".into()),
            ..ControllerSettings::default()
        },
        ..config
    }
}

#[test]
fn the_commented_out_fields_of_the_default_file_have_their_defaults() {
    let steering = SteeringConfig {
        node_cidrs: Some(
            ["10.20.0.0/16", "fd00:20::/64"]
                .map(ToOwned::to_owned)
                .into(),
        ),
        allow: Some(
            ["host", "namespace:monitoring", "10.244.7.0/24"]
                .map(ToOwned::to_owned)
                .into(),
        ),
        forwarded: vec!["10.30.0.0/24".to_owned()],
        ..SteeringConfig::default()
    };
    let node = TunnelConfig {
        steering: Some(steering),
        gateway: Some(GatewaySettings {
            deny_file: Some("/etc/culvert/deny".into()),
            ..GatewaySettings::default()
        }),
        identity: Some(IdentityConfig {
            files: Some(IdentityFiles {
                ca: "ca.pem".into(),
                cert: "node.pem".into(),
                key: "node.key".into(),
            }),
            request: None,
        }),
        ..TunnelConfig::default()
    };
    let agent = agent::AgentSettings {
        gateways: vec!["gw.example:10262".to_owned()],
        ..agent::AgentSettings::default()
    };
    let edge = TunnelConfig {
        agent: Some(agent),
        identity: Some(IdentityConfig {
            files: None,
            request: Some(RequestConfig {
                kubeconfig: Some("/etc/kubernetes/kubelet.conf".into()),
                ..RequestConfig::default()
            }),
        }),
        ..TunnelConfig::default()
    };
    for (but, tunnel) in [
        (&["agent", "request"][..], node),
        (&["steering", "gateway", "files"], edge),
    ] {
        let wanted = with_examples(Config {
            tunnel,
            ..Config::default()
        });
        assert_eq!(Config::parse(&uncommented(but)).expect("good"), wanted);
    }
    assert_eq!(refusal(&uncommented(&["request"])).0, "tunnel.agent");
    assert_eq!(
        refusal(&uncommented(&["agent"])).0,
        "tunnel.identity.request"
    );
    let words = ServiceConfig {
        node_port_addresses: Some(["primary", "localhost"].map(ToOwned::to_owned).into()),
        ..ServiceConfig::default()
    };
    assert_eq!(words.node_ports(), ServiceConfig::default().node_ports());
}

#[test]
fn a_section_without_fields_has_the_defaults() {
    assert_eq!(
        Config::parse("service:\nbpf:\n  maps:\n"),
        Ok(Config::default())
    );
    let source = Config::parse("source:\n  kube:\n").expect("good").source;
    assert_eq!(
        (source.file, source.kube),
        (None, Some(kube::KubeSettings::default()))
    );
    assert_eq!(refusal("tunnel:\n  agent:\n").0, "tunnel.identity");
}
