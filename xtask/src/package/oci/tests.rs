use std::{
    collections::BTreeMap,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use super::*;

/// Returns the path and content of each entry, in the archive's order.
fn read(archive: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(archive);
    let entries = archive.entries().expect("a tar");
    entries
        .map(|entry| {
            let mut entry = entry.expect("an entry");
            let path = entry.path().expect("a path").display().to_string();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).expect("its bytes");
            (path, bytes)
        })
        .collect()
}

fn json_of(files: &BTreeMap<String, Vec<u8>>, path: &str) -> Value {
    serde_json::from_slice(&files[path]).expect("JSON")
}

/// Checks the digest and size of a descriptor's blob, and returns the blob's content and path.
fn blob_of<'a>(files: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> (&'a [u8], String) {
    let digest = descriptor["digest"].as_str().expect("a digest");
    let digest = digest.strip_prefix("sha256:").expect("SHA-256");
    let path = blob_path(digest);
    let bytes = &files[&path];
    assert_eq!(layer::digest(bytes), digest);
    assert_eq!(descriptor["size"], bytes.len());
    (bytes, path)
}

fn write_file(root: &Path, path: &str, mode: u32, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().expect("a directory")).expect("its directory");
    fs::write(&path, text).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("its mode");
}

fn create_directory(root: &Path, path: &str, mode: u32) {
    fs::create_dir_all(root.join(path)).expect("a directory");
    fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).expect("its mode");
}

fn image() -> Image {
    Image {
        names: vec![
            "registry.test:5000/tool:1.0".to_owned(),
            "tool:latest".to_owned(),
        ],
        entrypoint: vec!["/tool".to_owned()],
        command: vec!["run".to_owned()],
        environment: vec!["PATH=/bin".to_owned()],
    }
}

/// Writes the image for a root directory, and returns the archive.
fn write_image(image: &Image, root: &Path) -> (Vec<u8>, WrittenImage) {
    let output = tempfile::tempdir().expect("a directory");
    let path = output.path().join("image.tar");
    let written = image.write(root, &path).expect("an image");
    let files: Vec<_> = fs::read_dir(output.path()).expect("it").collect();
    assert_eq!(files.len(), 1, "{files:?}");
    (fs::read(&path).expect("the archive"), written)
}

#[test]
fn each_name_leads_to_the_config_and_the_layer() {
    let root = tempfile::tempdir().expect("a directory");
    write_file(root.path(), "tool", 0o755, "binary");

    let (archive, written) = write_image(&image(), root.path());

    assert_eq!(written.bytes, archive.len() as u64);
    let files: BTreeMap<_, _> = read(&archive).into_iter().collect();
    assert_eq!(json_of(&files, "oci-layout")["imageLayoutVersion"], "1.0.0");
    let index = json_of(&files, "index.json");
    let entries = index["manifests"].as_array().expect("a list");
    let names = [
        ("registry.test:5000/tool:1.0", "1.0"),
        ("tool:latest", "latest"),
    ];
    for (entry, (name, tag)) in entries.iter().zip(names) {
        let annotations = &entry["annotations"];
        assert_eq!(annotations["io.containerd.image.name"], name);
        assert_eq!(annotations["org.opencontainers.image.ref.name"], tag);
        assert_eq!(entry["digest"], written.digest.as_str());
    }
    assert_eq!(entries.len(), names.len());
    let (_, manifest) = blob_of(&files, &entries[0]);
    let manifest = json_of(&files, &manifest);
    let (_, config) = blob_of(&files, &manifest["config"]);
    let config = json_of(&files, &config);
    assert_eq!(config["config"]["Entrypoint"], json!(["/tool"]));
    assert_eq!(config["config"]["Cmd"], json!(["run"]));
    assert_eq!(config["config"]["Env"], json!(["PATH=/bin"]));
    let layer = &manifest["layers"][0];
    assert_eq!(config["rootfs"]["diff_ids"][0], layer["digest"]);
    let (layer, _) = blob_of(&files, layer);
    assert_eq!(read(layer), [("tool".to_owned(), b"binary".to_vec())]);
    assert_eq!(manifest["layers"].as_array().map(Vec::len), Some(1));
}

#[test]
fn the_layer_keeps_modes_and_links_but_not_owners_and_times() {
    let root = tempfile::tempdir().expect("a directory");
    let long = format!("usr/{}file", "long/".repeat(40));
    write_file(root.path(), "bin/su", 0o4755, "set-user-ID");
    create_directory(root.path(), "tmp", 0o1777);
    write_file(root.path(), &long, 0o600, "a long path");
    symlink("su", root.path().join("bin/login")).expect("a link");
    symlink("/no/such", root.path().join("dangling")).expect("a link");

    let (archive, _) = write_image(&image(), root.path());

    let files: BTreeMap<_, _> = read(&archive).into_iter().collect();
    let is_layer =
        |bytes: &&Vec<u8>| !bytes.is_empty() && serde_json::from_slice::<Value>(bytes).is_err();
    let layer = files.values().find(is_layer).expect("a layer");
    let mut entries = BTreeMap::new();
    let mut archive = tar::Archive::new(layer.as_slice());
    for entry in archive.entries().expect("a tar") {
        let entry = entry.expect("an entry");
        let header = entry.header();
        for number in [header.uid(), header.gid(), header.mtime()] {
            assert_eq!(number.expect("a number"), 0);
        }
        let link = entry.link_name().expect("a name");
        let link = link.map(|link| link.display().to_string());
        let path = entry.path().expect("a path").display().to_string();
        let path = path.trim_end_matches('/').to_owned();
        entries.insert(path, (header.mode().expect("a mode"), link));
    }
    assert_eq!(entries["bin/su"], (0o4755, None));
    assert_eq!(entries["tmp"], (0o1777, None));
    assert_eq!(entries[&long], (0o600, None));
    assert_eq!(entries["bin/login"].1.as_deref(), Some("su"));
    assert_eq!(entries["dangling"].1.as_deref(), Some("/no/such"));
}

#[test]
fn equal_files_of_other_ages_and_order_give_an_equal_archive() {
    let names: Vec<String> = (0..40).map(|number| format!("file-{number}")).collect();
    let backwards = names.iter().rev().cloned().collect();
    let images = [names, backwards].map(|names: Vec<String>| {
        let root = tempfile::tempdir().expect("a directory");
        for (age, name) in (0..).zip(&names) {
            write_file(root.path(), name, 0o644, name);
            let file = File::open(root.path().join(name)).expect("the file");
            let time = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(age);
            file.set_modified(time).expect("its time");
        }
        write_image(&image(), root.path())
    });

    assert!(images[0] == images[1]);
    let (archive, _) = &images[0];
    let text = String::from_utf8_lossy(archive);
    let offsets: Vec<_> = (10..40)
        .map(|number| text.find(&format!("file-{number}\0")))
        .collect();
    assert!(offsets.is_sorted(), "{offsets:?}");
}

#[test]
fn a_file_that_cannot_be_packed_is_named_and_no_archive_is_left() {
    let root = tempfile::tempdir().expect("a directory");
    let socket = root.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let output = tempfile::tempdir().expect("a directory");
    let path = output.path().join("image.tar");

    let error = image().write(root.path(), &path).expect_err("a socket");

    assert!(format!("{error:#}").contains("socket"), "{error:#}");
    assert_eq!(fs::read_dir(output.path()).expect("it").count(), 0);
}

#[test]
fn a_name_without_a_tag_is_refused() {
    assert_eq!(tag("registry.test:5000/tool:1.0").expect("a tag"), "1.0");
    for name in ["tool", "registry.test:5000/tool", "tool:", ":1.0", ""] {
        tag(name).expect_err(name);
    }
}
