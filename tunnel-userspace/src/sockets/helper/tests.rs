use tunnel_common::{
    origin::{Origin, OverflowKey},
    service::{Backend, FrontendKey},
};

use super::*;
use crate::sockets::TranslatedSocket;

/// Maps that have no entries.
struct EmptyMaps;

impl TranslationMaps for EmptyMaps {
    fn sockets(&self, _: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>) -> io::Result<()> {
        Ok(())
    }

    fn backend(&self, _: u32) -> io::Result<Option<Backend>> {
        Ok(None)
    }

    fn backends(&self) -> io::Result<Vec<Backend>> {
        Ok(Vec::new())
    }

    fn owner(&self, _: &FrontendKey) -> io::Result<Option<u32>> {
        Ok(None)
    }

    fn older_translations(
        &self,
        _: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
    ) -> io::Result<()> {
        Ok(())
    }

    fn overflow(&self, _: &OverflowKey) -> io::Result<Option<Origin>> {
        Ok(None)
    }
}

struct HelperFixture {
    directory: tempfile::TempDir,
    scan_number: watch::Sender<u64>,
    view: watch::Receiver<TerminatorView>,
    drain: watch::Sender<bool>,
    server: Option<HelperServer>,
}

impl HelperFixture {
    fn new() -> Self {
        let (scan_number, began) = watch::channel(1);
        let (sender, view) = watch::channel(TerminatorView::default());
        let server = HelperServer {
            protocols: vec![Protocol::UDP],
            scan_number: began,
            view: sender,
            pods_without_helper: PodTerminator::Unreached("no rights".to_owned()),
        };
        Self {
            directory: tempfile::tempdir().expect("a directory"),
            scan_number,
            view,
            drain: watch::Sender::new(false),
            server: Some(server),
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("sockets.sock")
    }

    fn serve(&mut self) -> impl Future<Output = ()> + use<> {
        let server = self.server.take().expect("served once");
        serve(self.socket(), server, self.drain.subscribe())
    }

    /// Runs a test's actions while the server is running, then drains the server.
    async fn run(&mut self, actions: impl AsyncFnOnce(&mut Self)) -> TerminatorView {
        let served = self.serve();
        let actions = async {
            actions(self).await;
            self.drain.send_replace(true);
        };
        tokio::join!(served, actions);
        self.view.borrow().clone()
    }

    /// Connects to the server as a helper would.
    async fn helper(&self) -> Stream {
        let connected = timeout(Duration::from_secs(5), async {
            loop {
                if let Ok(stream) = UnixStream::connect(self.socket()).await {
                    return stream;
                }
                tokio::task::yield_now().await;
            }
        });
        BufReader::new(connected.await.expect("in time"))
    }

    /// Waits until the view meets a condition, and returns the view.
    async fn until(&mut self, wanted: impl FnMut(&TerminatorView) -> bool) -> TerminatorView {
        let found = timeout(Duration::from_secs(5), self.view.wait_for(wanted)).await;
        found.expect("in time").expect("published").clone()
    }
}

/// Reads the next order. Returns `None` at the end of the connection.
async fn order(stream: &mut Stream) -> Option<ScanOrder> {
    read_line(stream).await.expect("a line")
}

async fn report(stream: &mut Stream, number: u64, ended: u64, problem: Option<&str>) {
    let scan = ScanReport {
        ended,
        left: 0,
        problem: problem.map(str::to_owned),
        is_retryable: problem.is_some(),
    };
    let written = write_line(stream, &HelperReport { number, scan }).await;
    written.expect("written");
}

#[tokio::test]
async fn a_helper_scans_at_once_and_after_each_removal_and_its_end_is_published() {
    let actions = async |fixture: &mut HelperFixture| {
        let mut stream = fixture.helper().await;
        for (number, total) in [(1, 3), (2, 6)] {
            fixture.scan_number.send_replace(number);
            let order = order(&mut stream).await.expect("an order");
            assert_eq!((order.number, order.protocols), (number, vec![17]));
            report(&mut stream, number, 3, None).await;
            let view = fixture.until(|view| view.terminated == total).await;
            assert_eq!(view.pods, PodTerminator::Helper);
        }
        drop(stream);
        let disconnected = PodTerminator::Unreached("no rights".to_owned());
        fixture.until(|view| view.pods == disconnected).await;
    };
    HelperFixture::new().run(actions).await;
}

#[tokio::test]
async fn a_failed_scan_is_published_and_repeated() {
    let actions = async |fixture: &mut HelperFixture| {
        let mut stream = fixture.helper().await;
        for problem in [Some("not now"), None] {
            assert_eq!(order(&mut stream).await.expect("an order").number, 1);
            report(&mut stream, 1, 0, problem).await;
            let is_published =
                |view: &TerminatorView| view.helper_problem.as_deref() == problem && view.scans > 0;
            fixture.until(is_published).await;
        }
    };
    assert_eq!(HelperFixture::new().run(actions).await.failed_scans, 1);
}

#[tokio::test]
async fn a_client_that_violates_the_protocol_is_disconnected_and_the_next_is_served() {
    let actions = async |fixture: &mut HelperFixture| {
        let other = r#"{"look":9,"ended":0,"left":0,"problem":null,"again":false}"#;
        for line in ["hello\n", "{}", &format!("{other}\n")] {
            let mut stream = fixture.helper().await;
            stream.write_all(line.as_bytes()).await.expect("written");
            stream.shutdown().await.expect("shut down");
            assert!(order(&mut stream).await.is_some());
            assert!(order(&mut stream).await.is_none(), "after {line}");
        }
    };
    assert_eq!(HelperFixture::new().run(actions).await.scans, 0);
}

#[tokio::test]
async fn a_helper_waits_for_a_daemon_and_reconnects_to_the_next_one() {
    let mut fixture = HelperFixture::new();
    let (stop, stopped) = watch::channel(false);
    let socket = fixture.socket();
    let open = || Ok::<_, io::Error>(EmptyMaps);
    let has_scanned = async |fixture: &mut HelperFixture| {
        let is_so = |view: &TerminatorView| view.scans == 1 && view.helper_problem.is_none();
        fixture.until(is_so).await;
    };
    let actions = async {
        fixture.run(has_scanned).await;
        let mut next = HelperFixture::new();
        fs::remove_dir(fixture.directory.path()).expect("the socket is removed");
        std::os::unix::fs::symlink(next.directory.path(), fixture.directory.path())
            .expect("a link");
        next.run(has_scanned).await;
        fs::remove_file(fixture.directory.path()).expect("removed");
        stop.send_replace(true);
    };
    tokio::join!(run_helper(&socket, open, stopped), actions);
}
