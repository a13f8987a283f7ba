use std::{net::IpAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::*;
use crate::{
    admin::fixture::{self, LOOPBACKS, TIMEOUT, WILDCARDS, free_port, send},
    plan::HealthCheck,
};

/// A daemon that serves health check node ports.
struct Daemon {
    base: fixture::Daemon,
    checks: watch::Sender<Arc<HealthChecks>>,
    warnings: watch::Receiver<Arc<[ObjectWarning]>>,
}

impl Daemon {
    fn start() -> Self {
        let mut base = fixture::Daemon::new();
        let (checks, follower) = watch::channel(Arc::default());
        let served =
            HealthCheckServer::new(follower, Arc::clone(&base.views), base.drain.subscribe());
        let warnings = served.warnings();
        base.tasks.spawn(served.run());
        Self {
            base,
            checks,
            warnings,
        }
    }

    /// Starts a daemon with a Service `web` that has `local` ready endpoints (IPv4, then IPv6), and waits
    /// until its health check node port is served on both loopback addresses.
    async fn of_web(local: [usize; 2]) -> (Self, [SocketAddr; 2]) {
        let daemon = Self::start();
        let port = free_port().await;
        let at = LOOPBACKS.map(|ip| SocketAddr::new(ip, port));
        daemon.set(&LOOPBACKS, &[("web", port, local)]);
        for at in at {
            request_until(at, &["\"web\""]).await;
        }
        (daemon, at)
    }

    fn set(&self, addresses: &[IpAddr], services: &[(&str, u16, [usize; 2])]) {
        let services = services.iter().map(|(service, port, [v4, v6])| {
            let check = HealthCheck {
                port: *port,
                ready_endpoints: BTreeMap::from([(Family::V4, *v4), (Family::V6, *v6)]),
                uid: Some("1-2-3".into()),
                created: None,
            };
            (ObjectName::new("shop", *service), check)
        });
        self.checks.send_replace(Arc::new(HealthChecks {
            addresses: addresses.iter().copied().collect(),
            services: services.collect(),
        }));
    }

    /// Waits until the daemon reports exactly the given Services as unserved, each with a reason that
    /// contains the given text.
    async fn until_unserved(&self, refused: &[(&str, &str)]) {
        let mut view = self.base.views.health_checks.subscribe();
        let is_reported = |view: &HealthChecksView| {
            let reported = view.unserved.iter();
            let reported = reported.map(|(service, why)| (service.as_str(), why.as_str()));
            let wanted = refused.iter();
            view.unserved.len() == refused.len()
                && reported
                    .zip(wanted)
                    .all(|((service, why), (wanted, part))| {
                        service == *wanted && why.contains(part)
                    })
        };
        let reported = timeout(TIMEOUT, view.wait_for(is_reported)).await;
        assert!(
            reported.is_ok(),
            "{:?}",
            self.base.views.health_checks.borrow()
        );
    }
}

/// Repeats a request until the response contains all of `parts`.
async fn request_until(address: SocketAddr, parts: &[&str]) {
    let has_all = |response: &str| parts.iter().all(|part| response.contains(part));
    fixture::request_until("GET /", address, |response| response.is_some_and(has_all)).await;
}

#[tokio::test]
async fn a_response_equals_that_of_kube_proxy_byte_for_byte() {
    let (daemon, [v4, v6]) = Daemon::of_web([3, 0]).await;

    let response = send("GET /", v4).await.expect("a response");

    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    for line in [
        "Content-Type: application/json",
        "X-Content-Type-Options: nosniff",
        "X-Load-Balancing-Endpoint-Weight: 3",
    ] {
        assert!(head.lines().any(|found| found == line), "{head}");
    }
    assert_eq!(
        body,
        "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\
         \t\"localEndpoints\": 3,\n\t\"serviceProxyHealthy\": true\n}"
    );
    for (at, is_synced) in [(v6, true), (v4, false), (v6, false)] {
        daemon.base.stats.send_modify(|it| it.synced = is_synced);
        request_until(at, &["503 Service"]).await;
    }
}

#[tokio::test]
async fn a_port_is_opened_updated_and_closed_with_its_service() {
    let (daemon, [v4, v6]) = Daemon::of_web([2, 0]).await;
    let port = v4.port();

    request_until(v4, &["200 OK", "Weight: 2"]).await;
    request_until(v6, &["503 Service", "Weight: 0"]).await;
    daemon.set(&LOOPBACKS, &[("web", port, [0, 1])]);
    request_until(v4, &["503 Service", "Weight: 0"]).await;
    request_until(v6, &["200 OK", "Weight: 1"]).await;
    // The port now belongs to another Service, and the listener stays open.
    daemon.set(&LOOPBACKS, &[("other", port, [4, 4])]);
    request_until(v4, &["200 OK", "Weight: 4", "\"other\""]).await;
    for request in ["POST /any/path?at=all", "DELETE /", "OPTIONS *"] {
        let response = send(request, v6).await.expect("a response");
        assert!(response.starts_with("HTTP/1.1 200 OK"), "{response}");
    }

    daemon.set(&LOOPBACKS, &[]);
    for at in [v4, v6] {
        fixture::request_until("GET /", at, |response| response.is_none()).await;
    }
}

#[tokio::test]
async fn listeners_on_all_addresses_and_on_single_ones_replace_each_other() {
    let daemon = Daemon::start();
    let port = free_port().await;
    for addresses in [WILDCARDS, LOOPBACKS, WILDCARDS] {
        daemon.set(&addresses, &[("web", port, [1, 2])]);
        // The listeners on the previous addresses are closed first, so no bind fails.
        for (ip, weight) in [(LOOPBACKS[0], "Weight: 1"), (LOOPBACKS[1], "Weight: 2")] {
            request_until(SocketAddr::new(ip, port), &[weight]).await;
        }
        assert_eq!(
            daemon.base.views.health_checks.borrow().ports_in_use_total,
            0
        );
    }
}

#[tokio::test]
async fn an_unhealthy_daemon_fails_every_health_check() {
    let (daemon, at) = Daemon::of_web([1, 1]).await;
    let stats = &daemon.base.stats;

    for at in at {
        request_until(at, &["200 OK", "\"serviceProxyHealthy\": true"]).await;
    }
    stats.send_modify(|stats| stats.synced = false);
    for at in at {
        let parts = ["503 Service", "Weight: 1", "\"serviceProxyHealthy\": false"];
        request_until(at, &parts).await;
    }
    // The health checks of a node's Services pass even if load balancers should not send traffic to the node.
    stats.send_modify(|stats| {
        stats.synced = true;
        stats.node_eligible = false;
    });
    for at in at {
        request_until(at, &["200 OK"]).await;
    }
}

#[tokio::test]
async fn a_port_in_use_is_reported_bound_later_and_delays_no_other() {
    for ip in LOOPBACKS {
        let mut daemon = Daemon::start();
        let (port, other) = (free_port().await, free_port().await);
        let taken = TcpListener::bind((ip, port)).await.expect("a port");

        daemon.set(
            &[ip],
            &[
                ("lost", other, [9, 9]),
                ("web", port, [1, 1]),
                ("first", other, [2, 2]),
            ],
        );

        let owned = "belongs to shop/first";
        let busy = format!("health check port {port}: Address");
        daemon
            .until_unserved(&[("shop/lost", owned), ("shop/web", &busy)])
            .await;
        request_until(SocketAddr::new(ip, other), &["Weight: 2"]).await;
        let warnings = daemon.warnings.borrow_and_update().to_vec();
        assert_eq!(warnings.len(), 2);
        for (warning, name) in warnings.iter().zip(["lost", "web"]) {
            assert_eq!(&*warning.regarding.name.name, name);
            assert_eq!(warning.reason, Reason::HealthPortInUse);
            assert_eq!(warning.uid.as_deref(), Some("1-2-3"));
        }

        drop(taken);
        daemon.until_unserved(&[("shop/lost", owned)]).await;
        request_until(SocketAddr::new(ip, port), &["200 OK", "\"web\""]).await;
        assert_eq!(daemon.warnings.borrow().len(), 1);
        assert_eq!(
            daemon.base.views.health_checks.borrow().ports_in_use_total,
            2
        );
    }
}

#[tokio::test]
async fn idle_clients_do_not_block_others() {
    let request = "GET / HTTP/1.1\r\nHost: lab\r\n\r\n";
    for (what, sent, count) in [
        (
            "without a request",
            "",
            4 * HealthCheckRoutes::MAX_CONNECTIONS,
        ),
        (
            "after a request",
            request,
            HealthCheckRoutes::MAX_CONNECTIONS,
        ),
    ] {
        let (_daemon, at) = Daemon::of_web([1, 1]).await;
        let mut staying = Vec::new();
        for at in at {
            for _ in 0..count {
                let mut stream = TcpStream::connect(at).await.expect("connected");
                stream.write_all(sent.as_bytes()).await.expect("written");
                let mut response = vec![0; sent.len().min(12)];
                stream.read_exact(&mut response).await.expect("a response");
                staying.push(stream);
            }
        }
        for at in at {
            let response = timeout(Duration::from_secs(2), send("GET /", at)).await;
            let response = response.expect(what);
            assert!(response.is_some_and(|response| response.contains("200 OK")));
        }
    }
}
