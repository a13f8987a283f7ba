//! Generates the manifests of a benchmark's Services.

use std::net::IpAddr;

pub(crate) use tunnel_tests::kube_proxy_rules::FIRST_CLUSTER_IP;
use tunnel_tests::{
    address::nth_address,
    manifest::{Manifest, Protocol, Service},
};

/// The number of Services in each file.
const SERVICES_PER_FILE: usize = 10_000;

/// Builds files that contain many Services. `backends` returns a Service's endpoints, given its number.
pub(crate) fn service_files<I: IntoIterator<Item = IpAddr>>(
    count: u32,
    protocol: Protocol,
    [port, target]: [u16; 2],
    backends: impl Fn(u32) -> I,
) -> Vec<Manifest> {
    files_of(count, |number| {
        service(number)
            .port(protocol, port, target)
            .backends(backends(number))
    })
}

/// Builds a Service's name and ClusterIP from its number.
pub(crate) fn service(number: u32) -> Service {
    let address = nth_address(FIRST_CLUSTER_IP, number);
    Service::new(&format!("svc-{number}"), [address])
}

/// Builds files that contain many Services, each of which `service` builds from its number.
pub(crate) fn files_of(count: u32, service: impl Fn(u32) -> Service) -> Vec<Manifest> {
    let file = |first: u32| {
        let numbers = (first..count).take(SERVICES_PER_FILE);
        let services: Vec<_> = numbers.map(&service).collect();
        Manifest::of_services(&format!("services-{first}.yaml"), &services)
    };
    (0..count).step_by(SERVICES_PER_FILE).map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_split_into_files_of_ten_thousand() {
        let files = service_files(25_000, Protocol::TCP, [80, 9000], |_| [FIRST_CLUSTER_IP]);

        assert_eq!(files.len(), 3);
        assert_eq!(files[2].text.matches("kind: Service\n").count(), 5_000);
        assert!(files[2].text.contains("10.97.97.167"));
    }
}
