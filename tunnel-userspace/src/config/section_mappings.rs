//! Checks that each section of the config file is a mapping or empty. serde would also accept a list, and
//! assign its items to the fields in order.

use serde_json::{Map, Value};

use super::{
    Config, FieldError, IdentityConfig, LogConfig, ServiceConfig, SourceConfig, SteeringConfig,
    TOP_LEVEL, TunnelConfig,
};
use crate::bpf::{KernelLog, KernelLogLevel};

/// Returns an error if a section is a list or a scalar. Replaces an empty section with an empty mapping, so
/// that serde applies the defaults.
pub(super) fn check(file: &mut Value) -> Result<(), FieldError> {
    check_section(file, &with_all_sections(), "")
}

/// Returns a config that includes every optional section.
pub(super) fn with_all_sections() -> Value {
    let config = Config {
        source: SourceConfig {
            file: Some(Default::default()),
            kube: Some(Default::default()),
        },
        log: LogConfig {
            kernel: Some(KernelLog {
                program: String::new(),
                level: KernelLogLevel::default(),
            }),
        },
        tunnel: TunnelConfig {
            steering: Some(SteeringConfig {
                node_cidrs: Some(Vec::new()),
                ..SteeringConfig::default()
            }),
            gateway: Some(Default::default()),
            agent: Some(Default::default()),
            identity: Some(IdentityConfig {
                files: Some(Default::default()),
                request: Some(Default::default()),
            }),
            ..TunnelConfig::default()
        },
        service: ServiceConfig {
            node_port_addresses: Some(Vec::new()),
            ..ServiceConfig::default()
        },
        ..Config::default()
    };
    config.effective()[super::CONFIGZ_KEY].take()
}

/// Checks the sections in `found` against `known`, the same part of a config that has every section. `path`
/// is the path of `found` in the file.
fn check_section(found: &mut Value, known: &Value, path: &str) -> Result<(), FieldError> {
    let Some(sections) = known.as_object() else {
        return Ok(());
    };
    let field = if path.is_empty() { TOP_LEVEL } else { path };
    let kind = match found {
        Value::Object(fields) => {
            return fields.iter_mut().try_for_each(|(name, value)| {
                let known = sections.get(name).unwrap_or(&Value::Null);
                let dot = if path.is_empty() { "" } else { "." };
                check_section(value, known, &format!("{path}{dot}{name}"))
            });
        }
        Value::Null => {
            *found = Value::Object(Map::new());
            return Ok(());
        }
        Value::Array(_) => "a list",
        Value::Bool(_) | Value::Number(_) | Value::String(_) => "a single value",
    };
    let fields: Vec<_> = sections.keys().map(String::as_str).collect();
    let reason = format!(
        "must be a mapping, but is {kind}; valid fields are {}",
        fields.join(", ")
    );
    Err((field.to_owned(), reason))
}
