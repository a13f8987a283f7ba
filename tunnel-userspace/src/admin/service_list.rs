//! The list of Services, the response to `/services`.

use std::io;

use super::{ServiceParts, json_list::ListWriter};
use crate::reconcile::ServicePart;

/// Writes a list of Services as a JSON array.
pub(super) struct ServiceWriter {
    /// The remaining parts.
    parts: ServiceParts,
    /// The number of Services written so far.
    services: usize,
    /// True if the current Service has a port.
    has_port: bool,
}

impl ServiceWriter {
    pub(super) const fn new(parts: ServiceParts) -> Self {
        Self {
            parts,
            services: 0,
            has_port: false,
        }
    }

    /// Writes a part in the format of [`crate::reconcile::ServiceView`].
    fn write(&mut self, chunk: &mut Vec<u8>, part: &ServicePart) -> serde_json::Result<()> {
        match part {
            ServicePart::Start(name) => {
                let before: &[u8] = if self.services > 0 { b"]}," } else { b"[" };
                chunk.extend_from_slice(before);
                chunk.extend_from_slice(br#"{"namespace":"#);
                serde_json::to_writer(&mut *chunk, &*name.namespace)?;
                chunk.extend_from_slice(br#","name":"#);
                serde_json::to_writer(&mut *chunk, &*name.name)?;
                chunk.extend_from_slice(br#","ports":["#);
                self.services += 1;
                self.has_port = false;
            }
            ServicePart::Port(port) => {
                if std::mem::replace(&mut self.has_port, true) {
                    chunk.push(b',');
                }
                serde_json::to_writer(chunk, port)?;
            }
        }
        Ok(())
    }
}

impl ListWriter for ServiceWriter {
    fn write_next(&mut self, chunk: &mut Vec<u8>) -> io::Result<bool> {
        let Some(part) = self.parts.next() else {
            let end: &[u8] = if self.services > 0 { b"]}]" } else { b"[]" };
            chunk.extend_from_slice(end);
            return Ok(false);
        };
        self.write(chunk, &part)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use http_body_util::BodyExt as _;
    use hyper::{Response, StatusCode};
    use tokio::time::Instant;

    use super::*;
    use crate::{
        admin::{
            http_server::ResponseBody,
            json_list::{CHUNK_BYTES, ListLimit, MAX_LISTS, MAX_WAIT},
        },
        model::ObjectName,
        reconcile::{PortView, ServiceView},
    };

    /// Returns a Service's port.
    fn port(number: usize) -> PortView {
        PortView {
            port: format!("p\"{number}"),
            ..PortView::default()
        }
    }

    /// Returns the parts of one Service per given number of ports.
    fn parts(ports: &[usize]) -> Vec<ServicePart> {
        let services = ports.iter().enumerate();
        let parts = services.flat_map(|(service, ports)| {
            let start = ServicePart::Start(ObjectName::new("shop", format!("web-{service}")));
            let ports = (0..*ports).map(|number| ServicePart::Port(Box::new(port(number))));
            std::iter::once(start).chain(ports)
        });
        parts.collect()
    }

    /// Responds with the given parts.
    async fn respond(limit: &ListLimit, parts: Vec<ServicePart>) -> Response<ResponseBody> {
        let parts = Box::new(parts.into_iter());
        limit.respond(|| ServiceWriter::new(parts)).await
    }

    #[tokio::test]
    async fn a_list_is_the_json_of_its_services() {
        let limit = ListLimit::default();
        for ports in [&[][..], &[0], &[1], &[2, 0, 3], &[0, 2000, 1]] {
            let response = respond(&limit, parts(ports)).await;

            let body = response.into_body().collect().await.expect("a body");
            let wanted = ServiceView::collect(parts(ports).into_iter());
            let wanted = serde_json::to_vec(&wanted).expect("JSON");
            assert!(body.to_bytes() == wanted, "{ports:?}");
        }
    }

    #[tokio::test]
    async fn a_list_is_created_only_while_it_is_read() {
        let created = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&created);
        let many = (0..20_000).map(move |number| {
            count.fetch_add(1, Ordering::Relaxed);
            match number {
                0 => ServicePart::Start(ObjectName::new("shop", "web")),
                number => ServicePart::Port(Box::new(port(number))),
            }
        });
        let limit = ListLimit::default();
        let response = limit.respond(|| ServiceWriter::new(Box::new(many))).await;
        let mut body = response.into_body();
        assert_eq!(created.load(Ordering::Relaxed), 0);

        let mut last = 0;
        for _ in 0..3 {
            let frame = body.frame().await.expect("a frame").expect("no error");
            let bytes = frame.into_data().expect("data").len();
            assert!(bytes < 2 * CHUNK_BYTES, "{bytes}");
            let all = created.load(Ordering::Relaxed);
            // The JSON of a port is longer than 100 bytes.
            assert!((1..=CHUNK_BYTES / 100).contains(&(all - last)), "{all}");
            last = all;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn more_lists_than_the_limit_are_refused_until_one_has_been_read() {
        let limit = ListLimit::default();
        let mut open = Vec::new();
        for _ in 0..MAX_LISTS {
            open.push(respond(&limit, parts(&[1])).await);
        }
        let began = Instant::now();

        let refused = respond(&limit, parts(&[1])).await;

        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(began.elapsed(), MAX_WAIT);
        drop(open.pop());
        let served = respond(&limit, parts(&[1])).await;
        assert_eq!(served.status(), StatusCode::OK);
    }
}
