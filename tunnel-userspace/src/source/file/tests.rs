mod completeness;
mod fixture;
mod large;
mod renames;
mod replaced;

use std::{
    fs,
    io::Write as _,
    os::unix::fs::{OpenOptionsExt as _, symlink},
};

use fixture::{INVALID, directory, service, service_and};
use tokio::time::timeout;

use super::*;
use crate::{
    model::{Kind, ObjectName},
    source::tests::TIMEOUT,
};

#[tokio::test]
async fn the_first_update_of_an_empty_directory_is_complete() {
    let mut source = fixture::watch(directory(), "manifests").await;

    let update = source.take().await;
    assert!(update.synced && update.services.is_empty() && update.nodes.is_empty());
    assert!(update.complete, "nothing is missing from nothing");
    assert!(source.report.borrow().synced);
    source.stop().await;
}

#[tokio::test]
async fn a_missing_directory_is_an_error_with_its_path() {
    let overlay = Store::default().overlay();

    let error = start(FileSettings::new("/nowhere/manifests"), overlay)
        .await
        .expect_err("no directory");

    assert_eq!(
        error.to_string(),
        "cannot read manifests in /nowhere/manifests"
    );
    assert!(
        matches!(error, FileSourceError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    );
}

#[test]
fn the_first_read_includes_a_file_that_is_replaced_continuously() {
    let dir = directory();
    let manifests = dir.path().join("manifests");
    let replace = |ip: u8| {
        let draft = dir.path().join("draft");
        fs::write(&draft, service("a", &format!("10.0.0.{ip}"))).expect("written");
        fs::rename(&draft, manifests.join("a.yaml")).expect("renamed");
    };
    replace(1);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                replace(2);
            }
        });
        let missing = (0..500)
            .filter(|_| {
                let (update, _) = read(&manifests).expect("read");
                update.services.is_empty()
            })
            .count();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(missing, 0);
    });
}

#[tokio::test]
async fn written_replaced_and_deleted_files_cause_updates() {
    let mut source = fixture::with_one_service().await;

    source.write("b.yml", service("b", "10.0.0.2"));
    source.until("a=10.0.0.1 b=10.0.0.2").await;
    source.write("a.yaml", service("a", "10.0.0.3"));
    source.until_without_loss("a=10.0.0.3 b=10.0.0.2").await;
    source.replace("a.yaml", &service("a", "10.0.0.4"));
    source.until_without_loss("a=10.0.0.4 b=10.0.0.2").await;
    fs::remove_file(source.path("b.yml")).expect("removed");
    source.until("a=10.0.0.4").await;
    source.rename("a.yaml", "a.yaml.off");
    source.until("").await;
}

#[tokio::test]
async fn an_update_has_the_time_when_the_change_was_noticed() {
    let mut source = fixture::with_one_service().await;
    let before = monotonic();

    source.replace("a.yaml", &service("a", "10.0.0.2"));
    let update = source.take().await;

    assert!((before..=monotonic()).contains(&update.noticed_at));
}

#[tokio::test]
async fn a_file_that_is_being_written_loses_nothing() {
    let mut source = fixture::with_one_service().await;
    source.write("b.yaml", service("b", "10.0.0.2"));
    source.until("a=10.0.0.1 b=10.0.0.2").await;

    // The file is truncated, and contains only a comment while the other files change.
    let mut slow = fs::File::create(source.path("a.yaml")).expect("truncated");
    slow.write_all(b"# to be continued\n").expect("written");
    source.write(".hidden", "");
    fs::create_dir(source.path("directory")).expect("a directory");
    source.write("b.yaml", service("b", "10.0.0.3"));
    source.until_without_loss("a=10.0.0.1 b=10.0.0.3").await;
    // Nothing is lost in the next two polls either, although a file that nobody has open for writing would be
    // read by then.
    fs::hard_link(source.path("b.yaml"), source.path("c")).expect("linked");
    fs::remove_file(source.path("b.yaml")).expect("removed");
    fs::write(source.path("c"), service("c", "10.0.0.4")).expect("written");
    source.rename("c", "c.yaml");
    source.until("a=10.0.0.1 c=10.0.0.4").await;

    slow.write_all(service("a", "10.0.0.9").as_bytes())
        .expect("written");
    drop(slow);
    source.until_without_loss("a=10.0.0.9 c=10.0.0.4").await;
    assert_eq!(source.report.borrow().problems, []);
}

#[tokio::test]
async fn a_hard_link_to_a_complete_file_is_read() {
    let mut source = fixture::with_one_service().await;
    fs::write(source.dir.path().join("outside"), service("b", "10.0.0.2")).expect("written");

    fs::hard_link(source.dir.path().join("outside"), source.path("b.yaml")).expect("linked");
    source.until("a=10.0.0.1 b=10.0.0.2").await;

    // The file is created without a name, so that it never has more than one link.
    let unnamed = fs::OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(source.path(""));
    if let Ok(mut unnamed) = unnamed {
        unnamed
            .write_all(service("c", "10.0.0.3").as_bytes())
            .expect("written");
        let path = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&unnamed)
        );
        nix::unistd::linkat(
            nix::fcntl::AT_FDCWD,
            path.as_str(),
            nix::fcntl::AT_FDCWD,
            &source.path("c.yaml"),
            nix::fcntl::AtFlags::AT_SYMLINK_FOLLOW,
        )
        .expect("linked");
        source.until("a=10.0.0.1 b=10.0.0.2 c=10.0.0.3").await;
        drop(unnamed);
    }
}

#[tokio::test]
async fn a_mounted_config_map_is_swapped_without_loss() {
    let dir = tempfile::tempdir().expect("a directory");
    let mount = dir.path().join("manifests");
    let fill = |version: &str, address: &str| {
        let data = mount.join(version);
        fs::create_dir_all(&data).expect("a directory");
        fs::write(data.join("a.yaml"), service("a", address)).expect("written");
        fs::write(data.join("b.yaml"), service("b", address)).expect("written");
        symlink(version, mount.join("..data_tmp")).expect("linked");
        fs::rename(mount.join("..data_tmp"), mount.join("..data")).expect("renamed");
    };
    fill("..2024_1", "10.0.0.1");
    symlink("..data/a.yaml", mount.join("a.yaml")).expect("linked");
    symlink("..data/b.yaml", mount.join("b.yaml")).expect("linked");
    let mut source = fixture::watch(dir, "manifests").await;
    source.until("a=10.0.0.1 b=10.0.0.1").await;

    fill("..2024_2", "10.0.0.2");
    fs::remove_dir_all(mount.join("..2024_1")).expect("removed");

    source.until_without_loss("a=10.0.0.2 b=10.0.0.2").await;
}

#[tokio::test]
async fn the_target_of_a_link_is_polled_since_it_causes_no_event() {
    let mut source = fixture::with_one_service().await;
    let elsewhere = source.dir.path().join("elsewhere");
    fs::write(&elsewhere, service("b", "10.0.0.2")).expect("written");
    symlink(&elsewhere, source.path("b.yaml")).expect("linked");
    source.until("a=10.0.0.1 b=10.0.0.2").await;

    fs::write(&elsewhere, service("b", "10.0.0.3")).expect("written");
    source.until_without_loss("a=10.0.0.1 b=10.0.0.3").await;
    fs::rename(&elsewhere, source.dir.path().join("away")).expect("renamed");
    source
        .until_problems(&["manifests/b.yaml: can't be read: No such file"])
        .await;
    fs::write(&elsewhere, service("b", "10.0.0.4")).expect("written");
    source.until_without_loss("a=10.0.0.1 b=10.0.0.4").await;
    source.until_problems(&[]).await;
}

#[tokio::test]
async fn an_invalid_document_keeps_the_last_valid_version_and_is_reported() {
    let mut source = fixture::with_two_services().await;

    source.write("a.yaml", service_and("10.0.0.3", INVALID));

    source.until_without_loss("a=10.0.0.3 bad=10.0.0.7").await;
    let problem = "manifests/a.yaml:6: document 2: Service default/bad: spec.clusterIP: \"x\" is \
                   not an IP address";
    source.until_problems(&[problem]).await;
    let counts = source.report.borrow().objects.clone();
    assert_eq!(counts.get(&Kind::Service), Some(&2));
    source.write("a.yaml", "kind: [\n");
    source
        .until_problems(&["manifests/a.yaml:1: document 1: is not valid YAML"])
        .await;
    source.write("a.yaml", service("a", "10.0.0.4"));
    source.until("a=10.0.0.4").await;
    source.until_problems(&[]).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_read_keeps_its_objects() {
    let mut source = fixture::with_one_service().await;

    source.write("a.yaml", [0xff, 0xfe]);
    source
        .until_problems(&["manifests/a.yaml: can't be read: it is not UTF-8 text"])
        .await;
    source.replace("a.yaml", &service("a", "10.0.0.2"));
    source.until_without_loss("a=10.0.0.2").await;

    // The file is sparse, and larger than the limit.
    let large = fs::File::options()
        .write(true)
        .open(source.path("a.yaml"))
        .expect("opened");
    large
        .set_len(FileSettings::default().max_file_bytes + 1)
        .expect("grown");
    drop(large);
    source
        .until_problems(&["can't be read: it is larger than 67108864 bytes"])
        .await;
    nix::unistd::mkfifo(&source.path("p.yaml"), nix::sys::stat::Mode::S_IRUSR).expect("a pipe");
    source.write("b.yaml", service("b", "10.0.0.3"));
    source.until_without_loss("a=10.0.0.2 b=10.0.0.3").await;
    source
        .until_problems(&["larger", "p.yaml: can't be read: it is not a regular file"])
        .await;
}

#[tokio::test]
async fn a_directory_that_is_moved_away_keeps_its_objects_and_is_found_again() {
    let mut source = fixture::with_one_service().await;
    let [directory, away] = ["manifests", "away"].map(|name| source.dir.path().join(name));

    fs::rename(&directory, &away).expect("renamed");
    source
        .until_problems(&["manifests: can't be reached: "])
        .await;
    fs::create_dir(&directory).expect("a directory");
    source
        .until_problems(&["manifests: was replaced by a directory without manifests; the objects"])
        .await;
    fs::write(away.join("a.yaml"), service("wrong", "10.0.0.9")).expect("written");
    source.write("b.yaml", service("a", "10.0.0.2"));

    source.until_without_loss("a=10.0.0.2").await;
    source.until_problems(&[]).await;
    source.write("b.yaml", service("a", "10.0.0.3"));
    source.until_without_loss("a=10.0.0.3").await;
}

#[tokio::test]
async fn a_single_file_is_watched_through_its_directory() {
    let dir = directory();
    let path = dir.path().join("manifests/one.conf");
    fs::write(path, service("a", "10.0.0.1")).expect("written");
    let mut source = fixture::watch(dir, "manifests/one.conf").await;
    source.until("a=10.0.0.1").await;

    source.write("other.yaml", service("other", "10.0.0.9"));
    source.replace("one.conf", &service("a", "10.0.0.2"));
    source.until_without_loss("a=10.0.0.2").await;
    fs::remove_file(source.path("one.conf")).expect("removed");
    source.until("").await;
}

#[tokio::test]
async fn json_and_lists_are_read_and_hidden_files_and_subdirectories_are_not() {
    let mut source = fixture::with_one_service().await;
    let json = |name: &str, address: &str| {
        format!(
            r#"{{"kind":"Service","apiVersion":"v1","metadata":{{"name":"{name}"}},"spec":{{"clusterIP":"{address}","ports":[{{"port":80}}]}}}}"#
        )
    };
    source.write(".hidden.yaml", service("hidden", "10.0.0.9"));
    fs::create_dir(source.path("sub.yaml")).expect("a directory");
    fs::write(source.path("sub.yaml/x.yaml"), service("sub", "10.0.0.9")).expect("written");
    source.write(
        "b.json",
        format!("{}\n{}", json("b", "10.0.0.2"), json("c", "10.0.0.3")),
    );
    let list = format!(
        r#"{{"kind":"List","apiVersion":"v1","items":[{}]}}"#,
        json("d", "10.0.0.4")
    );
    source.write("c.yaml", list);

    source
        .until("a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 d=10.0.0.4")
        .await;
    source.until_problems(&[]).await;
}

#[tokio::test]
async fn changes_are_collected_while_the_receiver_is_busy_and_none_is_lost() {
    let mut source = fixture::with_one_service().await;

    for i in 0..200 {
        source.write(&format!("s{i}.yaml"), service(&format!("s{i}"), "10.0.1.1"));
        source.replace("a.yaml", &service("a", &format!("10.0.2.{i}")));
    }
    let has_read = |report: &SourceReport| report.objects.get(&Kind::Service) == Some(&201);
    source.until_report(has_read).await;
    let mut updates = 0;
    while source.known.len() < 201 || !source.describe().contains("a=10.0.2.199") {
        source.take().await;
        updates += 1;
    }

    assert!(updates <= 4, "{updates} updates");
}

#[test]
fn a_directory_is_read_once_without_a_watch() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("a.yaml"), service("a", "10.0.0.1")).expect("written");
    fs::write(dir.path().join("b.yaml"), INVALID).expect("written");

    let (update, problems) = read(dir.path()).expect("read");

    assert_eq!(update.services[0].0, ObjectName::new("default", "a"));
    assert_eq!((update.services.len(), problems.len()), (1, 1));
    let (update, problems) = read(&dir.path().join("a.yaml")).expect("read");
    assert_eq!((update.services.len(), problems.len()), (1, 0));
    read(&dir.path().join("c.yaml")).expect_err("there is no such file");
}

/// Watches a directory, runs `step`, and returns the first changes that the watch collects.
async fn changes(directory: &Path, step: impl FnOnce() -> io::Result<()>) -> DirectoryChanges {
    let mut watch = DirectoryWatch::new(
        &ManifestPath::new(directory, &FileSettings::default()).expect("a target"),
    )
    .expect("a watch");
    step().expect("done");
    timeout(TIMEOUT, watch.changed()).await.expect("in time");
    watch.take()
}

#[tokio::test]
async fn a_swapped_link_and_a_removed_directory_are_noticed_at_once() {
    let dir = directory();
    let [draft, data, directory] =
        ["..tmp", "..data", "manifests"].map(|name| dir.path().join(name));
    symlink("..2024_1", &draft).expect("linked");

    let swapped = changes(dir.path(), || fs::rename(draft, data)).await;
    let removed = changes(&directory, || fs::remove_dir(&directory)).await;

    assert!(swapped.other_entry_changed);
    assert!(removed.directory_lost);
}
