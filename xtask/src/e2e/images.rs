//! Builds all of the cluster's container images, so that its nodes pull none.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use super::rootfs;
use crate::{package::oci::Image, progress, vm::download_cache};

/// The images to build. Each also gets the names of the images that it replaces in Kubernetes' tests; only
/// the last part of those names is listed here.
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
/// The registry that the images' names begin with.
const REGISTRY: &str = "culvert.test";

/// Builds the image archives that are missing or were built from different programs. If Kubernetes' own specs are wanted, the
/// images get the names that these use, too.
pub(super) fn build(components: &Path, has_kubernetes_specs: bool) -> Result<()> {
    let programs = components.join("bin");
    let mut inputs = inputs(components)?;
    inputs.push_str(&format!("has_kubernetes_specs: {has_kubernetes_specs}\n"));
    let stamp = components.join("stamps/images");
    let images = components.join("images");
    let exists = |(name, _): &(&str, &[&str])| archive_path(components, name).is_file();
    if super::is_built_from(&stamp, &inputs) && IMAGES.iter().all(exists) {
        return Ok(());
    }
    println!("build images ...");
    fs::create_dir_all(&images).with_context(|| format!("cannot create {}", images.display()))?;
    let listed = if has_kubernetes_specs {
        progress::output(Command::new(programs.join("e2e.test")).arg("--list-images"))?
    } else {
        String::new()
    };
    for (name, replaced) in IMAGES {
        let root = components.join("rootfs").join(name);
        download_cache::create_directory(&root, |root| fill_root(root, name, components))?;
        let (entrypoint, command) = if name == "agnhost" {
            ("/agnhost".to_owned(), vec!["pause".to_owned()])
        } else {
            (format!("/{name}"), Vec::new())
        };
        let image = Image {
            names: names(name, replaced, &listed),
            entrypoint: vec![entrypoint],
            command,
            environment: vec![
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned(),
            ],
        };
        image.write(&root, &archive_path(components, name))?;
    }
    fs::remove_dir_all(components.join("rootfs"))?;
    super::write_stamp(&stamp, &inputs)
}

fn archive_path(components: &Path, name: &str) -> PathBuf {
    components.join("images").join(format!("{name}.tar"))
}

fn fill_root(root: &Path, name: &str, components: &Path) -> Result<()> {
    let programs = components.join("bin");
    match name {
        "agnhost" => rootfs::agnhost(root, &programs.join(name), &components.join("debian")),
        "pause" => rootfs::pause(root),
        program => rootfs::copy_to_root(root, &programs.join(program)),
    }
}

/// Returns a string that changes whenever any input to the images changes: the stamps of all programs and
/// packages.
fn inputs(components: &Path) -> Result<String> {
    let mut stamps = Vec::new();
    for entry in fs::read_dir(components.join("stamps"))? {
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

/// Returns an image's names: its own, and those of the `listed` images that it replaces.
fn names(name: &str, replaced: &[&str], listed: &str) -> Vec<String> {
    let mut names = vec![format!("{REGISTRY}/{name}:1")];
    for line in listed.lines().map(str::trim) {
        let last = line.rsplit_once('/').map_or(line, |(_, last)| last);
        let Some((stem, _tag)) = last.split_once(':') else {
            continue;
        };
        // A Kubernetes test expects that images from this registry cannot be pulled.
        let must_be_missing = line.starts_with("invalid.");
        if replaced.contains(&stem) && !must_be_missing {
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
    fn an_image_has_its_own_name_and_those_of_the_images_that_it_replaces() {
        let listed = "host.test/pause:3\nhost.test/a/agnhost:2\nhost.test/agnhost-x:1\n\
                      invalid.host.test/agnhost:1\n";

        let names = names("agnhost", &["agnhost"], listed);

        assert_eq!(names, ["culvert.test/agnhost:1", "host.test/a/agnhost:2"]);
    }
}
