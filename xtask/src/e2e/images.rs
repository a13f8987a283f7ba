//! The images for the nodes, built here: none is ever pulled.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use super::rootfs;
use crate::{
    package::oci::Image,
    vm::{archive, cache},
};

/// The images of Kubernetes' own specs that each image replaces, by the last parts of their names.
/// An image that no spec of Kubernetes uses has only Culvert's own name.
const IMAGES: [(&str, &[&str]); 4] = [
    (
        "agnhost",
        &[
            "agnhost",
            "busybox",
            "distroless-iptables",
            "glibc-dns-testing",
        ],
    ),
    ("pause", &["pause"]),
    ("coredns", &[]),
    ("regression-issue-74839", &["regression-issue-74839"]),
];
/// The registry of Culvert's own names.
const OWN: &str = "culvert.test";

/// Builds the archives that are missing, or were built from other programs.
pub(super) fn ready(place: &Path) -> Result<()> {
    let programs = place.join("bin");
    let source = source(place)?;
    let stamp = place.join("stamps/images");
    let images = place.join("images");
    let is_there = |(name, _): &(&str, &[&str])| archive_of(place, name).is_file();
    if super::is_made_from(&stamp, &source) && IMAGES.iter().all(is_there) {
        return Ok(());
    }
    println!("make images ...");
    fs::create_dir_all(&images).with_context(|| format!("cannot make {}", images.display()))?;
    let known = archive::output(Command::new(programs.join("e2e.test")).arg("--list-images"))?;
    for (name, stands_for) in IMAGES {
        let root = place.join("rootfs").join(name);
        cache::folder(&root, |root| fill(root, name, place))?;
        let (entrypoint, command) = if name == "agnhost" {
            ("/agnhost".to_owned(), vec!["pause".to_owned()])
        } else {
            (format!("/{name}"), Vec::new())
        };
        let image = Image {
            names: names(name, stands_for, &known),
            entrypoint: vec![entrypoint],
            command,
            environment: vec![
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            ],
        };
        image.write(&root, &archive_of(place, name))?;
    }
    fs::remove_dir_all(place.join("rootfs"))?;
    super::stamp(&stamp, &source)
}

fn archive_of(place: &Path, name: &str) -> PathBuf {
    place.join("images").join(format!("{name}.tar"))
}

fn fill(root: &Path, name: &str, place: &Path) -> Result<()> {
    let programs = place.join("bin");
    match name {
        "agnhost" => rootfs::agnhost(root, &programs.join(name), &place.join("debian")),
        "pause" => rootfs::pause(root),
        program => rootfs::single(root, &programs.join(program)),
    }
}

/// Returns the inputs of the archives: the stamps of the programs and of Debian's tools.
fn source(place: &Path) -> Result<String> {
    let mut stamps = Vec::new();
    for entry in fs::read_dir(place.join("stamps"))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name != "images") {
            stamps.push(path);
        }
    }
    stamps.sort();
    let mut text = String::new();
    for stamp in stamps {
        text.push_str(&fs::read_to_string(&stamp)?);
    }
    Ok(text)
}

/// Returns the names of an image: its own, and those of all images that it replaces.
fn names(name: &str, stands_for: &[&str], known: &str) -> Vec<String> {
    let mut names = vec![format!("{OWN}/{name}:1")];
    for line in known.lines().map(str::trim) {
        let last = line.rsplit_once('/').map_or(line, |(_, last)| last);
        let Some((stem, _tag)) = last.split_once(':') else {
            continue;
        };
        let is_nowhere = line.starts_with("invalid.");
        if stands_for.contains(&stem) && !is_nowhere {
            names.push(line.to_owned());
        }
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_our_name_and_those_of_all_it_stands_for() {
        let known = "host.test/pause:3\nhost.test/a/agnhost:2\nhost.test/agnhost-x:1\n\
                     invalid.host.test/agnhost:1\n";

        let names = names("agnhost", &["agnhost"], known);

        assert_eq!(names, ["culvert.test/agnhost:1", "host.test/a/agnhost:2"]);
    }
}
