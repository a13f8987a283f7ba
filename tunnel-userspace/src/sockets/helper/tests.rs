use tunnel_common::{
    origin::{Origin, OverflowKey},
    service::{Backend, FrontendKey},
};

use super::*;
use crate::sockets::Remembered;

/// Maps without entries.
struct Nothing;

impl Memory for Nothing {
    fn sockets(&self, _: &mut dyn FnMut(Remembered) -> io::Result<()>) -> io::Result<()> {
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

    fn older(&self, _: &OverflowKey) -> io::Result<Option<Origin>> {
        Ok(None)
    }
}

struct Stage {
    folder: tempfile::TempDir,
    looks: watch::Sender<u64>,
    view: watch::Receiver<TerminatorView>,
    drain: watch::Sender<bool>,
    desk: Option<Desk>,
}

impl Stage {
    fn new() -> Self {
        let (looks, began) = watch::channel(1);
        let (sender, view) = watch::channel(TerminatorView::default());
        let desk = Desk {
            protocols: vec![Protocol::UDP],
            looks: began,
            view: sender,
            without: Pods::Unreached("no rights".to_owned()),
        };
        Self {
            folder: tempfile::tempdir().expect("a folder"),
            looks,
            view,
            drain: watch::Sender::new(false),
            desk: Some(desk),
        }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("sockets.sock")
    }

    fn serve(&mut self) -> impl Future<Output = ()> + use<> {
        let desk = self.desk.take().expect("served once");
        serve(self.socket(), desk, self.drain.subscribe())
    }

    /// Runs a test's actions while the server runs, then drains it.
    async fn play(&mut self, story: impl AsyncFnOnce(&mut Self)) -> TerminatorView {
        let served = self.serve();
        let story = async {
            story(self).await;
            self.drain.send_replace(true);
        };
        tokio::join!(served, story);
        self.view.borrow().clone()
    }

    /// Connects as a helper.
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

    /// Waits until the view matches a condition.
    async fn until(&mut self, wanted: impl FnMut(&TerminatorView) -> bool) -> TerminatorView {
        let found = timeout(Duration::from_secs(5), self.view.wait_for(wanted)).await;
        found.expect("in time").expect("published").clone()
    }
}

/// Reads the next order; returns none at the end of the connection.
async fn order(stream: &mut Stream) -> Option<Order> {
    read_line(stream).await.expect("a line")
}

async fn report(stream: &mut Stream, look: u64, ended: u64, problem: Option<&str>) {
    let scan = Scan {
        ended,
        left: 0,
        problem: problem.map(str::to_owned),
        is_retryable: problem.is_some(),
    };
    let told = write_line(stream, &Report { look, scan }).await;
    told.expect("written");
}

#[tokio::test]
async fn a_helper_looks_at_once_and_each_time_that_a_backend_goes_and_is_missed_when_it_ends() {
    let story = async |stage: &mut Stage| {
        let mut stream = stage.helper().await;
        for (look, total) in [(1, 3), (2, 6)] {
            stage.looks.send_replace(look);
            let order = order(&mut stream).await.expect("an order");
            assert_eq!((order.look, order.protocols), (look, vec![17]));
            report(&mut stream, look, 3, None).await;
            let view = stage.until(|view| view.terminated == total).await;
            assert_eq!(view.pods, Pods::Helper);
        }
        drop(stream);
        let gone = Pods::Unreached("no rights".to_owned());
        stage.until(|view| view.pods == gone).await;
    };
    Stage::new().play(story).await;
}

#[tokio::test]
async fn a_look_that_failed_is_told_and_made_again() {
    let story = async |stage: &mut Stage| {
        let mut stream = stage.helper().await;
        for problem in [Some("not now"), None] {
            assert_eq!(order(&mut stream).await.expect("an order").look, 1);
            report(&mut stream, 1, 0, problem).await;
            let told = |view: &TerminatorView| view.helper_problem.as_deref() == problem && view.scans > 0;
            stage.until(told).await;
        }
    };
    assert_eq!(Stage::new().play(story).await.failed_scans, 1);
}

#[tokio::test]
async fn who_speaks_another_language_is_sent_away_and_the_next_is_heard() {
    let story = async |stage: &mut Stage| {
        let other = r#"{"look":9,"ended":0,"left":0,"problem":null,"again":false}"#;
        for line in ["hello\n", "{}", &format!("{other}\n")] {
            let mut stream = stage.helper().await;
            stream.write_all(line.as_bytes()).await.expect("written");
            stream.shutdown().await.expect("shut down");
            assert!(order(&mut stream).await.is_some());
            assert!(order(&mut stream).await.is_none(), "after {line}");
        }
    };
    assert_eq!(Stage::new().play(story).await.scans, 0);
}

#[tokio::test]
async fn a_helper_waits_for_a_daemon_and_calls_the_next_one() {
    let mut stage = Stage::new();
    let (stop, stopped) = watch::channel(false);
    let socket = stage.socket();
    let open = || Ok::<_, io::Error>(Nothing);
    let looked = async |stage: &mut Stage| {
        let is_so = |view: &TerminatorView| view.scans == 1 && view.helper_problem.is_none();
        stage.until(is_so).await;
    };
    let story = async {
        stage.play(looked).await;
        let mut next = Stage::new();
        fs::remove_dir(stage.folder.path()).expect("the socket is removed");
        std::os::unix::fs::symlink(next.folder.path(), stage.folder.path()).expect("a link");
        next.play(looked).await;
        fs::remove_file(stage.folder.path()).expect("removed");
        stop.send_replace(true);
    };
    tokio::join!(help(&socket, open, stopped), story);
}
