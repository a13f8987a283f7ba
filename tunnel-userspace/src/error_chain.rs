//! Formats an error together with its sources.

/// Returns the messages of an error and all its sources, joined with `: `.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    // Bounded by the error's nesting depth.
    while let Some(error) = source {
        let inner = error.to_string();
        // Some errors' messages already include that of their source.
        if !text.contains(&inner) {
            text.push_str(": ");
            text.push_str(&inner);
        }
        source = error.source();
    }
    text
}
