use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

use super::*;
use crate::{
    admin::fixture::{LOOPBACKS, ask, free_port, good, views},
    plan::HealthCheck,
    reconcile::Stats,
};

/// Longer than a port that is taken waits to be tried again.
const PATIENCE: Duration = Duration::from_secs(10);

/// A daemon that serves health checks.
struct Daemon {
    checks: watch::Sender<Arc<HealthChecks>>,
    stats: watch::Sender<Stats>,
    views: Arc<Views>,
    concerns: watch::Receiver<Arc<[Concern]>>,
    _drain: watch::Sender<bool>,
    _task: JoinSet<()>,
}

impl Daemon {
    fn start() -> Self {
        let (checks, follower) = watch::channel(Arc::default());
        let (stats, shown) = watch::channel(good());
        let views = Arc::new(views(shown));
        let (drain, draining) = watch::channel(false);
        let served = Checks::new(follower, Arc::clone(&views), draining);
        let concerns = served.concerns();
        let mut task = JoinSet::new();
        task.spawn(served.run());
        Self {
            checks,
            stats,
            views,
            concerns,
            _drain: drain,
            _task: task,
        }
    }

    fn set(&self, addresses: &[IpAddr], services: &[(&str, u16, [usize; 2])]) {
        let services = services.iter().map(|(service, port, [v4, v6])| {
            let check = HealthCheck {
                port: *port,
                local: BTreeMap::from([(Family::V4, *v4), (Family::V6, *v6)]),
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

    /// Waits until the daemon tells this of Services that are refused.
    async fn until_refused(&self, refused: &[(&str, &str)]) {
        let mut view = self.views.checks.subscribe();
        let is_told = |view: &ChecksView| {
            let told = view.refused.iter();
            let told = told.map(|(service, why)| (service.as_str(), why.as_str()));
            let wanted = refused.iter();
            view.refused.len() == refused.len()
                && told.zip(wanted).all(|((service, why), (wanted, part))| {
                    service == *wanted && why.contains(part)
                })
        };
        let told = timeout(PATIENCE, view.wait_for(is_told)).await;
        assert!(told.is_ok(), "{:?}", self.views.checks.borrow());
    }
}

/// Waits until an answer has those parts; nothing: until nobody listens.
async fn until_answered(address: SocketAddr, parts: Option<&[&str]>) {
    let mut last = None;
    let all = async {
        loop {
            last = ask("GET /", address).await.map(|it| it.to_lowercase());
            let is_so = match (&last, parts) {
                (Some(answer), Some(parts)) => parts.iter().all(|part| answer.contains(part)),
                (None, None) => true,
                (Some(_), None) | (None, Some(_)) => false,
            };
            if is_so {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let is_so = timeout(PATIENCE, all).await;
    assert!(is_so.is_ok(), "{address}: {last:?}, not {parts:?}");
}

#[tokio::test]
async fn an_answer_is_letter_for_letter_that_of_kube_proxy() {
    let response = answer(&ObjectName::new("shop", "web"), 3, true);
    let header = |name: &str| {
        let value = response.headers().get(name).expect(name);
        value.to_str().expect("text").to_owned()
    };
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(header("content-type"), "application/json");
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert_eq!(header("x-load-balancing-endpoint-weight"), "3");
    let body = http_body_util::BodyExt::collect(response.into_body()).await;
    assert_eq!(
        body.expect("a body").to_bytes(),
        "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\
         \t\"localEndpoints\": 3,\n\t\"serviceProxyHealthy\": true\n}"
    );
    for (local, is_healthy) in [(0, true), (3, false), (0, false)] {
        let answer = answer(&ObjectName::new("shop", "web"), local, is_healthy);
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
}

#[tokio::test]
async fn headers_are_written_as_kube_proxy_writes_them() {
    let daemon = Daemon::start();
    let port = free_port().await;
    let at = SocketAddr::new(LOOPBACKS[0], port);
    daemon.set(&LOOPBACKS, &[("web", port, [2, 0])]);
    until_answered(at, Some(&["200 ok"])).await;

    let answer = ask("GET /", at).await.expect("an answer");

    for line in [
        "Content-Type: application/json",
        "X-Content-Type-Options: nosniff",
        "X-Load-Balancing-Endpoint-Weight: 2",
    ] {
        assert!(answer.contains(&format!("\r\n{line}\r\n")), "{answer}");
    }
}

#[tokio::test]
async fn a_port_comes_changes_its_number_and_goes_with_its_service() {
    let daemon = Daemon::start();
    let port = free_port().await;
    let [v4, v6] = LOOPBACKS.map(|ip| SocketAddr::new(ip, port));

    daemon.set(&LOOPBACKS, &[("web", port, [2, 0])]);
    until_answered(v4, Some(&["200 ok", "weight: 2", "\"web\""])).await;
    until_answered(v6, Some(&["503 service", "weight: 0"])).await;
    daemon.set(&LOOPBACKS, &[("web", port, [0, 1])]);
    until_answered(v4, Some(&["503 service", "weight: 0"])).await;
    until_answered(v6, Some(&["200 ok", "weight: 1"])).await;
    // Another one gets the port while it is open.
    daemon.set(&LOOPBACKS, &[("other", port, [4, 4])]);
    until_answered(v4, Some(&["200 ok", "weight: 4", "\"other\""])).await;
    for request in ["POST /any/path?at=all", "DELETE /", "OPTIONS *"] {
        let answer = ask(request, v6).await.expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }

    daemon.set(&LOOPBACKS, &[]);
    until_answered(v4, None).await;
    until_answered(v6, None).await;
}

#[tokio::test]
async fn all_addresses_at_once_and_single_ones_take_each_others_place() {
    let daemon = Daemon::start();
    let port = free_port().await;
    let wildcards = [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    ];
    for addresses in [wildcards, LOOPBACKS, wildcards] {
        daemon.set(&addresses, &[("web", port, [1, 2])]);
        // Closed for the others, without a look at what is refused.
        for (ip, weight) in [(LOOPBACKS[0], "weight: 1"), (LOOPBACKS[1], "weight: 2")] {
            until_answered(SocketAddr::new(ip, port), Some(&[weight])).await;
        }
        assert_eq!(daemon.views.checks.borrow().refused_total, 0);
    }
}

#[tokio::test]
async fn a_daemon_that_can_not_do_its_work_takes_no_traffic() {
    let daemon = Daemon::start();
    let port = free_port().await;
    let at = LOOPBACKS.map(|ip| SocketAddr::new(ip, port));
    daemon.set(&LOOPBACKS, &[("web", port, [1, 1])]);

    for at in at {
        until_answered(at, Some(&["200 ok", "\"serviceproxyhealthy\": true"])).await;
    }
    daemon.stats.send_modify(|stats| stats.synced = false);
    for at in at {
        let parts = ["503 service", "weight: 1", "\"serviceproxyhealthy\": false"];
        until_answered(at, Some(&parts)).await;
    }
    // That load balancers are to leave the node is no matter of its Services.
    daemon.stats.send_modify(|stats| {
        stats.synced = true;
        stats.node_eligible = false;
    });
    for at in at {
        until_answered(at, Some(&["200 ok"])).await;
    }
}

#[tokio::test]
async fn a_port_that_is_taken_is_told_of_had_later_and_harms_no_other() {
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
            .until_refused(&[("shop/lost", owned), ("shop/web", &busy)])
            .await;
        until_answered(SocketAddr::new(ip, other), Some(&["weight: 2"])).await;
        let concerns = Arc::clone(&daemon.concerns.borrow_and_update());
        let told: Vec<_> = concerns
            .iter()
            .map(|concern| {
                (
                    &*concern.about.name.name,
                    concern.reason,
                    concern.uid.as_deref(),
                )
            })
            .collect();
        let reason = Reason::HealthPortTaken;
        let uid = Some("1-2-3");
        assert_eq!(told, [("lost", reason, uid), ("web", reason, uid)]);

        drop(taken);
        daemon.until_refused(&[("shop/lost", owned)]).await;
        until_answered(SocketAddr::new(ip, port), Some(&["200 ok", "\"web\""])).await;
        assert_eq!(daemon.concerns.borrow().len(), 1);
        assert_eq!(daemon.views.checks.borrow().refused_total, 2);
    }
}

#[tokio::test]
async fn clients_that_say_nothing_do_not_keep_a_port_from_others() {
    let daemon = Daemon::start();
    let port = free_port().await;
    let at = LOOPBACKS.map(|ip| SocketAddr::new(ip, port));
    daemon.set(&LOOPBACKS, &[("web", port, [1, 1])]);
    let mut silent = Vec::new();
    for at in at {
        until_answered(at, Some(&["200 ok"])).await;
        for _ in 0..4 * Check::MOST_CONNECTIONS {
            silent.push(TcpStream::connect(at).await.expect("connected"));
        }
    }

    for at in at {
        let answer = timeout(Duration::from_secs(2), ask("GET /", at)).await;
        let answer = answer.expect("at once");
        assert!(answer.is_some_and(|answer| answer.contains("200 OK")));
    }
}

#[tokio::test]
async fn clients_that_stay_after_their_answer_do_not_keep_a_port_from_others() {
    let daemon = Daemon::start();
    let port = free_port().await;
    daemon.set(&LOOPBACKS, &[("web", port, [1, 1])]);
    for ip in LOOPBACKS {
        let at = SocketAddr::new(ip, port);
        until_answered(at, Some(&["200 ok"])).await;
        let mut staying = Vec::new();
        for _ in 0..Check::MOST_CONNECTIONS {
            let mut stream = TcpStream::connect(at).await.expect("connected");
            let asked = b"GET / HTTP/1.1\r\nHost: lab\r\n\r\n";
            stream.write_all(asked).await.expect("asked");
            let mut first = [0; 12];
            stream.read_exact(&mut first).await.expect("answered");
            staying.push(stream);
        }

        let answer = timeout(Duration::from_secs(2), ask("GET /", at)).await;

        assert!(answer.expect("at once").is_some());
    }
}
