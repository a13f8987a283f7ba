//! The list of flows, the response to `/flows`.

use std::io;

use super::{FlowParts, json_list::ListWriter};
use crate::flows::FlowFilter;

/// Writes a list of flows as a JSON array.
pub(super) struct FlowWriter {
    flows: FlowParts,
    /// True if a flow has been written.
    has_flow: bool,
}

impl FlowWriter {
    pub(super) const fn new(flows: FlowParts) -> Self {
        Self {
            flows,
            has_flow: false,
        }
    }
}

impl ListWriter for FlowWriter {
    fn write_next(&mut self, chunk: &mut Vec<u8>) -> io::Result<bool> {
        let Some(flow) = self.flows.next() else {
            chunk.extend_from_slice(if self.has_flow { b"]" } else { b"[]" });
            return Ok(false);
        };
        chunk.push(if self.has_flow { b',' } else { b'[' });
        serde_json::to_writer(chunk, &flow?)?;
        self.has_flow = true;
        Ok(true)
    }
}

/// Parses the query of `/flows`: the parameters `client=` and `service=`.
///
/// # Errors
///
/// Returns an error if the client is not an IP address, or if a parameter is unknown.
pub(super) fn parse_query(query: &str) -> Result<FlowFilter, String> {
    let mut filter = FlowFilter::default();
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        match parameter.split_once('=') {
            Some(("client", text)) => {
                let ip: std::net::IpAddr = text
                    .parse()
                    .map_err(|_invalid| format!("client: `{text}` is not an IP address"))?;
                filter.client = Some(tunnel_common::addr::Address::from_ip(ip));
            }
            Some(("service", name)) => filter.service = Some(name.to_owned()),
            Some((name, _)) => return Err(format!("unknown parameter `{name}`")),
            None => return Err(format!("`{parameter}` is not a parameter")),
        }
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{admin::json_list::next_chunk, flows::FlowView};

    fn written(count: usize) -> Vec<u8> {
        let flows = (0..count).map(|number| {
            Ok(FlowView {
                client: format!("192.0.2.1:{number}"),
                ..FlowView::default()
            })
        });
        let mut writer = Some(FlowWriter::new(Box::new(flows)));
        let chunks = std::iter::from_fn(|| next_chunk(&mut writer).expect("written"));
        chunks.flatten().collect()
    }

    #[test]
    fn a_list_is_the_json_of_its_flows() {
        for count in [0, 1, 2, 5_000] {
            let flows: Vec<FlowView> = serde_json::from_slice(&written(count)).expect("JSON");
            assert_eq!(flows.len(), count);
        }
    }

    #[test]
    fn a_query_selects_a_client_and_a_service() {
        let filter = parse_query("service=shop/web&client=2001:db8::1").expect("good");
        assert_eq!(filter.service.as_deref(), Some("shop/web"));
        assert_eq!(
            filter.client.map(|it| it.to_string()),
            Some("2001:db8::1".to_owned())
        );
        assert!(parse_query("").expect("good").client.is_none());
        for wrong in ["client=web", "limit=3", "client"] {
            assert!(parse_query(wrong).is_err(), "{wrong}");
        }
    }
}
