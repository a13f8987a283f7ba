use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, Mutex, MutexGuard},
};

use tempfile::TempDir;
use tokio::time::Instant;

use super::*;
use crate::{
    identity::{ca::Authority, request::CertificateRequest},
    tasks::Tasks,
};

const HOUR: Duration = Duration::from_secs(3600);
/// The life of certificates in most tests.
const LIFE: Duration = Duration::from_secs(6 * 3600);
const NODE: &str = "edge-1";

fn start() -> Timestamp {
    "2026-11-30T12:00:00Z".parse().expect("a time")
}

/// The answers of the API server to requests.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Sign,
    Ignore,
    Deny,
    Unreachable,
}

/// The API server with a controller, and a clock that runs with tokio's time.
struct Server {
    authority: Authority,
    mode: Mode,
    objects: BTreeMap<String, (Vec<u8>, State)>,
    /// The time and name of each request that was made.
    made: Vec<(Timestamp, String)>,
    tries: u64,
    life: Duration,
    offset: SignedDuration,
    /// The time by which the controller's clock is behind.
    behind: SignedDuration,
    began: Instant,
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Server>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Server> {
        self.0.lock().expect("no panic")
    }

    fn clock(&self) -> Clock {
        let shared = self.clone();
        Box::new(move || shared.lock().now())
    }
}

impl Server {
    fn now(&self) -> Timestamp {
        start() + self.began.elapsed() + self.offset
    }
}

impl RequestApi for Shared {
    async fn ask(&self, asked: &Asked<'_>) -> Result<State, ApiError> {
        let mut server = self.lock();
        let now = server.now();
        server.tries += 1;
        if server.mode == Mode::Unreachable {
            return Err(ApiError::Request("connection refused".to_owned()));
        }
        if !server.objects.contains_key(asked.name) {
            server.made.push((now, asked.name.to_owned()));
            let object = (asked.request.to_vec(), State::Waits);
            server.objects.insert(asked.name.to_owned(), object);
        }
        let (request, state) = server.objects[asked.name].clone();
        assert_eq!(request, asked.request);
        if state != State::Waits {
            return Ok(state);
        }
        let state = match server.mode {
            Mode::Sign => {
                let read = CertificateRequest::read(&request).expect("a request");
                let now = now - server.behind;
                let until = now + server.life;
                let signed =
                    server
                        .authority
                        .certify(&read.public_key, asked.role, NODE, (now, until));
                State::Issued(signed.expect("a certificate").into_bytes())
            }
            Mode::Deny => State::Refused("WrongNode: there is no Node edge-1".to_owned()),
            Mode::Ignore | Mode::Unreachable => State::Waits,
        };
        server
            .objects
            .insert(asked.name.to_owned(), (request, state.clone()));
        Ok(state)
    }
}

/// A machine with a state directory and the file of trusted CAs.
struct Machine {
    directory: TempDir,
    server: Shared,
}

/// A requester that runs.
struct Running {
    state: watch::Receiver<RequestState>,
    tasks: Tasks,
}

impl Machine {
    fn new() -> Self {
        let authority = Authority::new(start(), start() + SignedDuration::from_hours(87_600));
        let authority = authority.expect("a CA");
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("ca.pem"), authority.cert_pem()).expect("written");
        let server = Server {
            authority,
            mode: Mode::Sign,
            objects: BTreeMap::new(),
            made: Vec::new(),
            tries: 0,
            life: LIFE,
            offset: SignedDuration::ZERO,
            behind: SignedDuration::ZERO,
            began: Instant::now(),
        };
        let server = Shared(Arc::new(Mutex::new(server)));
        Self { directory, server }
    }

    fn wanted(&self) -> Wanted {
        Wanted {
            role: Role::Agent,
            node: NODE.to_owned(),
            life: Some(LIFE),
            ca: self.directory.path().join("ca.pem"),
            directory: self.directory.path().join("identity"),
        }
    }

    fn run(&self) -> Running {
        let (requester, state) =
            Requester::new(self.wanted(), self.server.clone(), self.server.clock());
        let mut tasks = Tasks::default();
        tasks.start("requester", requester.run(tasks.draining()));
        Running { state, tasks }
    }

    fn set(&self, mode: Mode) {
        self.server.lock().mode = mode;
    }

    fn made(&self) -> Vec<(Timestamp, String)> {
        self.server.lock().made.clone()
    }

    fn pair(&self) -> Option<String> {
        fs::read_to_string(self.wanted().files().cert).ok()
    }
}

impl Running {
    async fn stop(self) {
        self.tasks.finish(Duration::from_secs(5)).await;
    }

    fn problem(&self) -> String {
        self.state.borrow().problem.clone().unwrap_or_default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_requested_once_and_renewed_after_70_to_90_percent_of_its_life() {
    let machine = Machine::new();
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    let first = machine.pair().expect("a certificate");
    assert_eq!(machine.made().len(), 1);
    assert_eq!(running.problem(), "");

    sleep(25 * LIFE).await;

    let made = machine.made();
    let gaps: Vec<_> = made
        .windows(2)
        .map(|two| two[0].0.duration_until(two[1].0).as_secs_f64() / LIFE.as_secs_f64())
        .collect();
    assert!(gaps.len() > 24, "{gaps:?}");
    // The clock is looked at once a minute.
    assert!(
        gaps.iter().all(|gap| (0.7..0.904).contains(gap)),
        "{gaps:?}"
    );
    let (least, most) = gaps.iter().fold((1.0_f64, 0.0_f64), |(least, most), gap| {
        (least.min(*gap), most.max(*gap))
    });
    assert!(most - least > 0.01, "renewals happen by chance: {gaps:?}");
    assert_ne!(machine.pair().expect("a certificate"), first);
    let names: std::collections::BTreeSet<_> = made.iter().map(|(_, name)| name).collect();
    assert_eq!(names.len(), made.len(), "each request has its own key");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn restarts_request_nothing_twice() {
    let machine = Machine::new();
    machine.set(Mode::Ignore);
    for _ in 0..3 {
        let running = machine.run();
        sleep(Duration::from_secs(60)).await;
        assert!(
            running.problem().contains("waits for approval"),
            "{}",
            running.problem()
        );
        running.stop().await;
    }
    assert_eq!(machine.made().len(), 1);

    machine.set(Mode::Sign);
    // The one that waits is answered only if it is asked for again.
    for _ in 0..3 {
        let running = machine.run();
        sleep(Duration::from_secs(600)).await;
        assert_eq!(running.problem(), "");
        running.stop().await;
    }
    assert_eq!(machine.made().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_denied_is_followed_by_one_with_another_key() {
    let machine = Machine::new();
    machine.set(Mode::Deny);
    let running = machine.run();
    sleep(Duration::from_secs(3600)).await;

    let made = machine.made();
    assert!((10..25).contains(&made.len()), "{}", made.len());
    assert!(running.problem().contains("there is no Node edge-1"));
    let lasting = |after: i64| {
        let now = start() + SignedDuration::from_mins(after);
        running.state.borrow().lasting_problem(now).is_some()
    };
    assert!(!lasting(59) && lasting(61));

    machine.set(Mode::Sign);
    sleep(Duration::from_secs(400)).await;
    assert_eq!(running.problem(), "");
    assert!(machine.pair().is_some());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_collected_before_it_is_answered_is_made_again() {
    let machine = Machine::new();
    machine.set(Mode::Ignore);
    let running = machine.run();
    sleep(8 * HOUR).await;
    machine.server.lock().objects.clear();
    machine.set(Mode::Sign);
    sleep(Duration::from_secs(400)).await;

    assert_eq!(machine.made().len(), 2);
    assert!(machine.pair().is_some());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_old_certificate_stays_while_the_api_server_is_away_and_a_new_one_follows() {
    let machine = Machine::new();
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    let first = machine.pair();
    machine.set(Mode::Unreachable);

    sleep(LIFE - HOUR / 10).await;
    assert_eq!(machine.pair(), first);
    assert!(running.problem().contains("connection refused"));
    // Now it has expired.
    sleep(4 * HOUR).await;
    assert_eq!(machine.pair(), first);
    let tries = machine.server.lock().tries;
    assert!(tries < 120, "{tries} tries");

    machine.set(Mode::Sign);
    sleep(Duration::from_secs(301)).await;
    assert_ne!(machine.pair(), first);
    assert_eq!(running.problem(), "");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn damaged_and_foreign_files_are_replaced() {
    let machine = Machine::new();
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    let good = machine.pair().expect("a certificate");
    running.stop().await;
    let path = machine.wanted().files().cert;

    let half = good.get(..good.len() / 2).expect("ASCII").to_owned();
    for damaged in ["", "nonsense", &half] {
        fs::write(&path, damaged).expect("written");
        let running = machine.run();
        sleep(Duration::from_secs(10)).await;
        let now = machine.pair().expect("a certificate");
        assert!(now.contains("PRIVATE KEY") && now != good, "{now}");
        running.stop().await;
    }
    // A state directory that was copied from another machine.
    let other = Wanted {
        node: "edge-2".to_owned(),
        ..machine.wanted()
    };
    let now = machine.server.lock().now();
    let error = OnDisk::new(other).current(now).err().expect("refused");
    assert!(error.to_string().contains("of node edge-1"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_of_a_ca_that_is_not_trusted_yet_waits_for_it() {
    let machine = Machine::new();
    let ca = machine.wanted().ca;
    let trusted = fs::read_to_string(&ca).expect("written");
    fs::write(&ca, "").expect("written");
    let running = machine.run();
    sleep(Duration::from_secs(60)).await;
    assert!(
        running.problem().contains("ca.pem"),
        "{}",
        running.problem()
    );
    assert_eq!(machine.pair(), None);

    fs::write(&ca, trusted).expect("written");
    sleep(Duration::from_secs(120)).await;
    assert_eq!(running.problem(), "");
    assert_eq!(machine.made().len(), 1);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_jumps_leads_to_few_requests() {
    let machine = Machine::new();
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    for hours in [1, -2, 1, 5, -5, 24, -24] {
        machine.server.lock().offset += SignedDuration::from_hours(hours);
        sleep(HOUR / 4).await;
        let current = OnDisk::new(machine.wanted()).current(machine.server.lock().now());
        assert!(current.is_ok(), "{hours}: {}", running.problem());
    }
    assert!(machine.made().len() <= 7, "{:?}", machine.made());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn certificates_of_20_seconds_are_renewed_in_time() {
    let machine = Machine::new();
    machine.server.lock().life = Duration::from_secs(20);
    let running = machine.run();
    sleep(Duration::from_secs(5)).await;
    for _ in 0..600 {
        sleep(Duration::from_secs(1)).await;
        let current = OnDisk::new(machine.wanted()).current(machine.server.lock().now());
        assert!(current.is_ok(), "{}", running.problem());
    }
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_clock_far_ahead_of_the_controllers_is_reported_and_makes_no_endless_requests() {
    let machine = Machine::new();
    machine.server.lock().behind = SignedDuration::try_from(LIFE.mul_f64(0.95)).expect("in range");
    // The CA is older than the certificates.
    machine.server.lock().offset = SignedDuration::from_hours(1000);
    let running = machine.run();
    sleep(Duration::from_secs(3600)).await;

    let made = machine.made().len();
    assert!((10..25).contains(&made), "{made}");
    let problem = running.problem();
    assert!(problem.contains("the clock of this machine"), "{problem}");
    machine.server.lock().behind = SignedDuration::ZERO;
    sleep(Duration::from_secs(400)).await;
    assert_eq!(running.problem(), "");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn damaged_trust_makes_no_request_while_there_is_a_certificate() {
    let machine = Machine::new();
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    let ca = machine.wanted().ca;
    let trusted = fs::read_to_string(&ca).expect("written");

    fs::write(&ca, "nonsense").expect("written");
    sleep(HOUR).await;
    assert_eq!(machine.made().len(), 1);
    assert!(
        running.problem().contains("ca.pem"),
        "{}",
        running.problem()
    );

    fs::write(&ca, trusted).expect("written");
    sleep(HOUR).await;
    assert_eq!(
        (machine.made().len(), running.problem()),
        (1, String::new())
    );
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_has_expired_before_it_could_be_used_is_followed_by_another_one() {
    let machine = Machine::new();
    let ca = machine.wanted().ca;
    let trusted = fs::read_to_string(&ca).expect("written");
    fs::write(&ca, "").expect("written");
    let running = machine.run();
    sleep(LIFE + HOUR).await;
    assert_eq!(machine.made().len(), 1);

    fs::write(&ca, trusted).expect("written");
    sleep(HOUR).await;
    assert_eq!(running.problem(), "");
    assert_eq!(machine.made().len(), 2);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_key_is_not_used_again_although_its_request_could_not_be_removed() {
    let machine = Machine::new();
    machine.set(Mode::Ignore);
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    let directory = machine.wanted().directory;
    let files = ["requested-key.pem", "request.pem"].map(|name| directory.join(name));
    let kept = files
        .each_ref()
        .map(|path| fs::read(path).expect("written"));
    machine.set(Mode::Sign);
    sleep(HOUR).await;
    assert_eq!(machine.made().len(), 1);

    for (path, bytes) in files.iter().zip(kept) {
        fs::write(path, bytes).expect("written");
    }
    sleep(LIFE).await;
    assert_eq!(machine.made().len(), 2);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_problem_that_has_gone_by_itself_is_forgotten() {
    let machine = Machine::new();
    let running = machine.run();
    sleep(Duration::from_secs(10)).await;
    machine.set(Mode::Unreachable);
    let path = machine.wanted().files().cert;
    let aside = machine.directory.path().join("aside");
    fs::rename(&path, &aside).expect("moved");
    sleep(HOUR / 4).await;
    assert_ne!(running.problem(), "");

    fs::rename(&aside, &path).expect("moved");
    sleep(HOUR / 4).await;
    assert_eq!(running.problem(), "");
    assert_eq!(running.state.borrow().received, 1);
    running.stop().await;
}
