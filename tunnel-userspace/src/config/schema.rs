//! The JSON Schema of the config file (<https://json-schema.org/draft/2020-12>), generated from the config's
//! types.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::Config;

/// Returns the schema as indented JSON. It lists every field with its type, default and meaning, and forbids
/// unknown fields. [`Config::parse`] also checks bounds, and constraints between fields.
#[must_use]
pub fn of_config() -> String {
    format!("{:#}", value_of_config())
}

/// Returns the same schema as a value.
pub(super) fn value_of_config() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
    });
    let schema = settings.into_generator().into_root_schema_for::<Config>();
    schema.to_value()
}
